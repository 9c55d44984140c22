// Operators that make or reshape device memory, which the fallback of operators.cpp uses as well.
#pragma once

#include "device.h"

namespace standin {

using MaybeType = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<c10::Device>;

int index_of(MaybeDevice device);
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, MaybeType dtype, MaybeLayout layout,
                         MaybeDevice device, std::optional<bool> pin);
at::Tensor view_of(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset);
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format);
void resize_storage(c10::StorageImpl& storage, size_t nbytes);  // keeps what both hold, frees the old memory

}  // namespace standin
