// A backend of torch.distributed that works as NCCL does, in stream order, and moves the bytes with gloo.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device.h"

namespace standin {

using Tensors = std::vector<at::Tensor>;

// wait() lets the current stream wait for the collective, as NCCL's does (and the host as well: gloo is synchronous to it).
class OrderedWork final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return !inner || inner->isCompleted(); }
  bool isSuccess() const override { return true; }

  c10::intrusive_ptr<c10d::Work> inner;  // gloo's; none if there was nothing to send
  Tensors held;                          // the device's tensors, and their host aliases, until it is over
  Clock done;
  int device = 0;
};

class OrderedBackend final : public c10d::Backend {
 public:
  explicit OrderedBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), inner_(std::move(gloo)) {}
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  c10::intrusive_ptr<OrderedWork> begin(const Tensors& inputs, const Tensors& outputs, const char* op);

  c10::intrusive_ptr<c10d::Backend> inner_;
  StreamKey stream_ = 0;  // the group's own stream, made with its first collective
  int device_ = -1;       // that of the first tensor
};

}  // namespace standin
