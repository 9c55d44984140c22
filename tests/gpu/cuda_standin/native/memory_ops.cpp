// Operators on memory: empty, views, resizing, copies, and the number that a host reads from the device.
#include "memory_ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <torch/library.h>

#include <cstring>

namespace standin {

namespace {

const c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::CUDA);

at::ScalarType type_or_default(MaybeType dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(at::get_default_dtype()));
}

}  // namespace

// As CUDA does: with deterministic algorithms, memory of a new tensor holds NaN, or the largest number.
static at::Tensor filled(at::Tensor made) {
  auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())
    at::native::fill_empty_deterministic_(made);
  return made;
}

int index_of(MaybeDevice device) { return device && device->has_index() ? device->index() : thread_state().device; }

at::Tensor empty(c10::IntArrayRef size, MaybeType dtype, MaybeLayout, MaybeDevice device, std::optional<bool> pin,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(index_of(device));
  return filled(at::detail::empty_generic(size, device_allocator(), kDeviceKeys, type_or_default(dtype), format));
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, MaybeType dtype, MaybeLayout,
                         MaybeDevice device, std::optional<bool>) {
  OnDevice on(index_of(device));
  return filled(at::detail::empty_strided_generic(size, stride, device_allocator(), kDeviceKeys, type_or_default(dtype)));
}

// -- views

at::Tensor view_of(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return made;
}

static at::Tensor shaped_like(const at::Tensor& self, const at::Tensor& on_host) {
  return view_of(self, on_host.sizes(), on_host.strides(), on_host.storage_offset());
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return view_of(self, size, stride, offset.value_or(self.storage_offset()));
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  at::AutoDispatchBelowADInplaceOrView below;
  return shaped_like(self, at::native::view(host_alias(self), size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return view_of(self, size, stride, self.storage_offset());
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  at::AutoDispatchBelowADInplaceOrView below;
  return shaped_like(self, host_alias(self).unfold(dim, size, step));
}

// -- storages

void resize_storage(c10::StorageImpl& storage, size_t nbytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  OnDevice on(storage.device().index());
  auto fresh = device_allocator()->allocate(nbytes);
  if (const size_t both = std::min(nbytes, storage.nbytes())) {
    auto& timeline = Timeline::get();
    Guarded guard(timeline.lock);
    const auto stream = current_key();
    const auto epoch = timeline.begin_op(stream);
    timeline.touch(reinterpret_cast<uintptr_t>(storage.data()), both, false, stream, epoch, "resize_");
    timeline.touch(reinterpret_cast<uintptr_t>(fresh.get()), both, true, stream, epoch, "resize_");
    std::memcpy(fresh.get(), storage.data(), both);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(nbytes);
}

static void grow(const at::Tensor& self, size_t nbytes) {
  auto& storage = *self.storage().unsafeGetStorageImpl();
  if (storage.nbytes() < nbytes) resize_storage(storage, nbytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  grow(self, (self.storage_offset() + self.numel()) * self.element_size());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  TORCH_CHECK(source.device().type() == c10::kCUDA, "Attempted to set the storage of a tensor on device \"",
              self.device(), "\" to a storage on different device \"", source.device(), "\"");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  grow(self, self.storage_offset() * self.element_size() + span_nbytes(self));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t numel = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  OnDevice on(self.device().index());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return set_storage(self, std::move(nothing), 0, {0}, {1});
}

void record_stream(at::Tensor& self, at::Stream stream) {
  Timeline::get().record_stream(const_cast<void*>(self.storage().data()), key_of(stream));
}

// -- copies

at::Scalar local_scalar(const at::Tensor& self) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto& timeline = Timeline::get();
  Guarded guard(timeline.lock);
  const auto stream = current_key(self.device().index());
  touch_tensor(self, false, stream, timeline.begin_op(stream), "item");
  timeline.synchronize(stream, "item");
  return at::_local_scalar_dense(host_alias(self));
}

// Between the host's pinned memory and the device: not before something asks for it. Until then the destination holds NaN.
static void copy_late(const at::Tensor& destination, const at::Tensor& source, StreamKey stream) {
  auto& timeline = Timeline::get();
  const bool to_device = is_on_device(destination);
  const std::string op = to_device ? "copy to the device" : "copy to the host";
  const auto epoch = timeline.begin_op(stream);
  touch_tensor(source, false, stream, epoch, op);
  touch_tensor(destination, true, stream, epoch, op);
  auto* storage = (to_device ? source : destination).unsafeGetTensorImpl()->storage().unsafeGetStorageImpl();
  PendingCopy copy{
      .to_device = to_device,
      .stream = stream,
      .epoch = epoch,
      .destination = destination.mutable_data_ptr(),
      .source = source.mutable_data_ptr(),
      .nbytes = destination.nbytes(),
      .host = c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
      .host_base = const_cast<void*>(storage->data()),
      .taken = {},
      .op = op,
  };
  const char* bytes = static_cast<char*>(copy.source);
  if (!to_device) copy.taken.assign(bytes, bytes + copy.nbytes);
  std::memset(copy.destination, 0xFF, copy.nbytes);
  timeline.queue(std::move(copy));
}

// A plain copy of bytes: anything else passes through a kernel or a staging buffer, and is done at once here.
static bool is_plain(const at::Tensor& destination, const at::Tensor& source) {
  return destination.scalar_type() == source.scalar_type() && destination.sizes() == source.sizes() &&
         destination.is_contiguous() && source.is_contiguous() && destination.numel();
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TORCH_CHECK(self.is_meta() || !source.is_meta(), "Cannot copy out of meta tensor; no data!");
  if (self.is_meta() || self.is_same(source)) return self;
  auto& timeline = Timeline::get();
  Guarded guard(timeline.lock);
  const bool to_device = is_on_device(self);
  const bool across = to_device != is_on_device(source);
  // from device to device as CUDA does it: on the source's stream, after and before what the other device's stream does
  const auto stream = current_key((across && to_device ? self : source).device().index());
  const auto& host = to_device ? source : self;
  const bool pinned = across && host.numel() && timeline.is_pinned(host.const_data_ptr());
  if (non_blocking && pinned && timeline.delay && is_plain(self, source)) {
    copy_late(self, source, stream);
    return self;
  }
  const auto other = across ? stream : current_key(self.device().index());
  timeline.join_stream(stream, timeline.mark(other));
  const auto epoch = timeline.begin_op(stream);
  touch_tensor(source, false, stream, epoch, "copy_");
  touch_tensor(self, true, stream, epoch, "copy_");
  timeline.join_stream(other, timeline.mark(stream));
  {
    at::AutoDispatchBelowADInplaceOrView below;
    auto destination = to_device ? host_alias(self) : self;
    destination.copy_(is_on_device(source) ? host_alias(source) : source);
  }
  // pageable memory: the host is held up on the way back even if it asked not to be
  const bool waits = across && (!non_blocking || (!pinned && !to_device));
  if (waits) timeline.synchronize(stream, to_device ? "copy to the device" : "copy to the host");
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  auto to = destination;
  copy_(to, self, non_blocking);
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

}  // namespace standin

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", standin::empty);
  m.impl("empty_strided", standin::empty_strided);
  m.impl("as_strided", standin::as_strided);
  m.impl("view", standin::view);
  m.impl("_reshape_alias", standin::reshape_alias);
  m.impl("unfold", standin::unfold);
  m.impl("resize_", standin::resize_);
  m.impl("set_.source_Storage_storage_offset", standin::set_storage);
  m.impl("set_.source_Storage", standin::set_whole_storage);
  m.impl("set_.source_Tensor", standin::set_tensor);
  m.impl("set_", standin::set_nothing);
  m.impl("record_stream", standin::record_stream);
  m.impl("_local_scalar_dense", standin::local_scalar);
  m.impl("copy_", standin::copy_);
  m.impl("_copy_from", standin::copy_from);
  m.impl("_copy_from_and_resize", standin::copy_from_and_resize);
}
