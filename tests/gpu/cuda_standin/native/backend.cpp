// Collectives in stream order: see backend.h.
#include "backend.h"

namespace standin {

namespace {

constexpr int64_t kFirstGroupStream = 1000;  // ids of streams of groups are told apart from those of Stream()

// gloo does not know every dtype: where nothing is added, bytes will do.
at::Tensor bytes_of(const at::Tensor& t) { return host_alias(t).view({-1}).view(at::kByte); }

Tensors bytes_of_all(const Tensors& tensors) {
  Tensors made;
  for (const auto& t : tensors) made.push_back(bytes_of(t));
  return made;
}

Tensors aliases_of(const Tensors& tensors) {
  Tensors made;
  for (const auto& t : tensors) made.push_back(host_alias(t));
  return made;
}

void hold(OrderedWork& work, const Tensors& tensors) {
  work.held.insert(work.held.end(), tensors.begin(), tensors.end());
}

}  // namespace

bool OrderedWork::wait(std::chrono::milliseconds timeout) {
  if (inner) inner->wait(timeout);
  auto& timeline = Timeline::get();
  Guarded guard(timeline.lock);
  timeline.join_stream(current_key(device), done);
  held.clear();
  inner.reset();
  return true;
}

c10::intrusive_ptr<OrderedWork> OrderedBackend::begin(const Tensors& inputs, const Tensors& outputs, const char* op) {
  auto work = c10::make_intrusive<OrderedWork>();
  for (const auto* tensors : {&inputs, &outputs}) {
    for (const auto& t : *tensors) {
      TORCH_CHECK(is_on_device(t), "No backend type associated with device type cpu (tensors must be CUDA and dense: ",
                  op, ")");
      TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous (", op, ")");
      if (device_ < 0) device_ = t.device().index();
      TORCH_CHECK(device_ == t.device().index(), "a group of NCCL has one device, cuda:", device_, ", found ", t.device());
      work->held.push_back(t);
    }
  }
  if (device_ < 0) device_ = thread_state().device;
  work->device = device_;

  auto& timeline = Timeline::get();
  Guarded guard(timeline.lock);
  if (!stream_) stream_ = (kFirstGroupStream + timeline.new_stream_id()) * kKeyStride + device_;
  timeline.join_stream(stream_, timeline.mark(current_key(device_)));
  const auto epoch = timeline.begin_op(stream_);
  const auto name = std::string("nccl ") + op;
  for (const auto& t : inputs) touch_tensor(t, false, stream_, epoch, name);
  for (const auto& t : outputs) touch_tensor(t, true, stream_, epoch, name);
  work->done = timeline.mark(stream_);
  return work;
}

OrderedBackend::WorkPtr OrderedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto work = begin(tensors, tensors, "broadcast");
  auto bytes = bytes_of_all(tensors);
  hold(*work, bytes);
  work->inner = inner_->broadcast(bytes, options);
  return work;
}

OrderedBackend::WorkPtr OrderedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto work = begin(tensors, tensors, "allreduce");
  auto aliases = aliases_of(tensors);
  hold(*work, aliases);
  work->inner = inner_->allreduce(aliases, options);
  return work;
}

OrderedBackend::WorkPtr OrderedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto work = begin(tensors, tensors, "reduce");
  auto aliases = aliases_of(tensors);
  hold(*work, aliases);
  work->inner = inner_->reduce(aliases, options);
  return work;
}

OrderedBackend::WorkPtr OrderedBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  auto work = begin(inputs, outputs.at(0), "allgather");
  std::vector<Tensors> to{bytes_of_all(outputs[0])};
  auto from = bytes_of_all(inputs);
  hold(*work, to[0]);
  hold(*work, from);
  work->inner = inner_->allgather(to, from, options);
  return work;
}

OrderedBackend::WorkPtr OrderedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::AllgatherOptions& options) {
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor");
  TORCH_CHECK(input.numel() * getSize() == output.numel(),
              "output tensor size must be equal to world_size times input tensor size");
  auto work = begin({input}, {output}, "all_gather");
  // a rank's input may be its part of the output (NCCL allows that), gloo writes while it reads: a copy
  Tensors from{bytes_of(input).clone()};
  std::vector<Tensors> to{bytes_of(output).chunk(getSize())};
  hold(*work, to[0]);
  hold(*work, from);
  work->inner = inner_->allgather(to, from, options);
  return work;
}

OrderedBackend::WorkPtr OrderedBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                             const c10d::ReduceScatterOptions& options) {
  auto work = begin({input}, {output}, "reduce_scatter");
  auto to = host_alias(output), from = host_alias(input);
  hold(*work, {to, from});
  work->inner = inner_->_reduce_scatter_base(to, from, options);
  return work;
}

OrderedBackend::WorkPtr OrderedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                      std::vector<int64_t>& output_splits,
                                                      std::vector<int64_t>& input_splits,
                                                      const c10d::AllToAllOptions& options) {
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "Tensors are not equal in data type");
  auto work = begin({input}, {output}, "all_to_all");
  auto to = host_alias(output).view(at::kByte), from = host_alias(input).view(at::kByte);
  hold(*work, {to, from});
  if (output.dim() == 1) {  // the splits count elements; a row of more dimensions stays a row of bytes
    for (auto* splits : {&output_splits, &input_splits})
      for (auto& split : *splits) split *= output.element_size();
  }
  if (getSize() == 1) {
    to.view({-1}).copy_(from.view({-1}));
  } else {
    work->inner = inner_->alltoall_base(to, from, output_splits, input_splits, options);
  }
  return work;
}

OrderedBackend::WorkPtr OrderedBackend::send(Tensors& tensors, int to, int tag) {
  auto work = begin(tensors, {}, "send");
  auto bytes = bytes_of_all(tensors);
  hold(*work, bytes);
  work->inner = inner_->send(bytes, to, tag);
  return work;
}

OrderedBackend::WorkPtr OrderedBackend::recv(Tensors& tensors, int from, int tag) {
  auto work = begin({}, tensors, "recv");
  auto bytes = bytes_of_all(tensors);
  hold(*work, bytes);
  work->inner = inner_->recv(bytes, from, tag);
  return work;
}

OrderedBackend::WorkPtr OrderedBackend::barrier(const c10d::BarrierOptions& options) {
  auto work = begin({}, {}, "barrier");
  work->inner = inner_->barrier(options);
  return work;
}

}  // namespace standin
