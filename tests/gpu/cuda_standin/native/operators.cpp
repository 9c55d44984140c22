// Every other operator: the CPU's own, on aliases of the device's memory, with the checks of devices that CUDA makes.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>

#include "memory_ops.h"

namespace standin {

namespace {

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Where CUDA's operators take tensors of the host that are no scalars: indices, and the source of a pinned copy.
bool takes_host_tensor(const std::string& op, const c10::Argument& argument) {
  const auto has = [&](const char* part) { return op.find(part) != std::string::npos; };
  if (has("::index") || has("_index_put_impl_") || has("unsafe_index")) return argument.name() == "indices";
  return op == "aten::_pin_memory";
}

// Operators whose output's shape depends on the data: the host waits for it.
const std::set<std::string>& data_dependent_ops() {
  static const std::set<std::string> names = {"aten::nonzero", "aten::masked_select", "aten::unique_dim",
                                              "aten::_unique2", "aten::unique_consecutive", "aten::repeat_interleave"};
  return names;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) visit(t);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) visit(item.toTensor());
    }
  }
}

c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> converted;
    for (const at::Tensor& t : value.toTensorVector()) converted.push_back(convert(t));
    return converted;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> converted;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
      converted.push_back(t ? std::optional<at::Tensor>(convert(*t)) : std::nullopt);
    }
    return converted;
  }
  return value;
}

// One call of an operator: which device it runs on, and which host tensor stands for which of the device's.
class Call {
 public:
  explicit Call(const c10::FunctionSchema& schema) : schema_(schema), name_(schema.name()) {}

  void find_device(at::ArrayRef<c10::IValue> given);
  c10::IValue to_host(const c10::IValue& value, const c10::Argument& argument);
  c10::IValue to_device(const c10::IValue& value) {
    return map_tensors(value, [this](const at::Tensor& t) { return tensor_to_device(t); });
  }
  void touch_all(StreamKey stream, uint64_t epoch);  // what has come since the last call of this

  const std::string& name() const { return name_; }
  int device() const { return device_.index(); }

 private:
  struct Pair {
    at::Tensor device, host;
  };
  struct Use {
    at::Tensor tensor;
    bool write;
  };
  void check_same_device(const at::Tensor& t);
  void check_host_tensor(const at::Tensor& t, const c10::Argument& argument) const;
  at::Tensor tensor_to_host(const at::Tensor& t, bool write);
  at::Tensor tensor_to_device(const at::Tensor& result);

  const c10::FunctionSchema& schema_;
  std::string name_;
  c10::Device device_{c10::kCUDA, -1};
  std::vector<Pair> pairs_;
  std::vector<Use> uses_;
  size_t touched_ = 0;
};

void Call::check_same_device(const at::Tensor& t) {
  if (!is_on_device(t)) return;
  TORCH_CHECK(device_.index() < 0 || device_ == t.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
              t.device(), " (", name_, ")");
  device_ = t.device();
}

void Call::check_host_tensor(const at::Tensor& t, const c10::Argument& argument) const {
  if (!t.defined() || t.device().type() != c10::kCPU) return;
  const bool is_number = t.dim() == 0 && !is_written(argument);
  TORCH_CHECK(is_number || takes_host_tensor(name_, argument),
              "Expected all tensors to be on the same device, but found at least two devices, ", device_,
              " and cpu (argument ", argument.name(), " of ", name_, ", shape ", t.sizes(), ")");
}

void Call::find_device(at::ArrayRef<c10::IValue> given) {
  for (const auto& value : given) {
    for_each_tensor(value, [this](const at::Tensor& t) { check_same_device(t); });
  }
  for (const auto& value : given) {
    if (value.isDevice() && device_.index() < 0) device_ = c10::Device(c10::kCUDA, index_of(value.toDevice()));
  }
  if (device_.index() < 0) device_ = c10::Device(c10::kCUDA, thread_state().device);
  for (size_t i = 0; i < given.size(); i++) {
    for_each_tensor(given[i], [&](const at::Tensor& t) { check_host_tensor(t, schema_.arguments()[i]); });
  }
}

c10::IValue Call::to_host(const c10::IValue& value, const c10::Argument& argument) {
  if (argument.type()->str().find("Generator") != std::string::npos) {
    const auto generator = value.isNone() ? default_generator(-1) : value.toGenerator();
    TORCH_CHECK(generator.device().type() == c10::kCUDA,
                "Expected a 'cuda' device type for generator but found 'cpu'");
    return host_generator(generator);
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return map_tensors(value, [&](const at::Tensor& t) { return tensor_to_host(t, is_written(argument)); });
}

at::Tensor Call::tensor_to_host(const at::Tensor& t, bool write) {
  if (!is_on_device(t)) return t;
  uses_.push_back({t, write});
  for (const auto& pair : pairs_) {
    if (pair.device.is_same(t)) return pair.host;
  }
  // an out= argument without memory is one that the operator will resize, which an alias can not be
  const bool is_to_be_resized = write && t.numel() == 0 && t.storage().nbytes() == 0;
  auto host = is_to_be_resized ? at::empty(t.sizes(), t.options().device(c10::kCPU)) : host_alias(t);
  pairs_.push_back({t, host});
  return host;
}

at::Tensor Call::tensor_to_device(const at::Tensor& result) {
  if (!result.defined() || result.device().type() != c10::kCPU) return result;
  for (const auto& [device, host] : pairs_) {
    if (!host.is_same(result)) continue;
    if (device.sizes() != result.sizes()) {
      resize_(device, result.sizes(), {});
      std::memcpy(device.mutable_data_ptr(), result.const_data_ptr(), result.nbytes());
    }
    return device;
  }
  for (const auto& [device, host] : pairs_) {
    if (result.storage().nbytes() && host.storage().data() == result.storage().data()) {
      return view_of(device, result.sizes(), result.strides(), result.storage_offset());
    }
  }
  auto made = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, device_, {});
  if (result.numel()) std::memcpy(made.mutable_data_ptr(), result.const_data_ptr(), span_nbytes(result));
  uses_.push_back({made, true});
  return made;
}

void Call::touch_all(StreamKey stream, uint64_t epoch) {
  for (; touched_ < uses_.size(); touched_++) {
    touch_tensor(uses_[touched_].tensor, uses_[touched_].write, stream, epoch, name_);
  }
}

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto num_arguments = schema.arguments().size();
  const auto given = torch::jit::pop(*stack, num_arguments);
  Call call(schema);
  call.find_device(given);
  OnDevice on(call.device());
  for (size_t i = 0; i < num_arguments; i++) stack->push_back(call.to_host(given[i], schema.arguments()[i]));

  auto& timeline = Timeline::get();
  Guarded guard(timeline.lock);
  const auto stream = current_key(call.device());
  const auto epoch = timeline.begin_op(stream);
  call.touch_all(stream, epoch);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  bool is_number = false;  // what the host sees, it has waited for
  for (const auto& result : torch::jit::pop(*stack, schema.returns().size())) {
    is_number = is_number || result.isBool() || result.isScalar();
    stack->push_back(call.to_device(result));
  }
  call.touch_all(stream, epoch);
  if (is_number || data_dependent_ops().count(call.name())) timeline.synchronize(stream, call.name());
}

// The CPU's own have other signatures or other paths than CUDA's: these are made of operators that both have.

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, at::kBool)};
  auto mask = at::empty_like(x, at::kBool).bernoulli_(1 - p);
  return {x * mask * (p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                     bool grouped) {
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, {}, scale, grouped));
}

}  // namespace standin

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&standin::fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("native_dropout", standin::native_dropout);
  m.impl("scaled_dot_product_attention", standin::attention);
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", standin::attention); }
