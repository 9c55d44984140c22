// What operators and the backend need of the stand-in device: which one is current, and its memory as host tensors.
#pragma once

#include "timeline.h"

namespace standin {

// Current device and streams, per host thread, as in CUDA.
struct ThreadState {
  int device = 0;
  std::map<int, int64_t> stream;  // device -> stream id
};
ThreadState& thread_state();

int device_count();                      // CUDA_STANDIN_DEVICES, 1 unless given
void check_device(int64_t index);        // raises for what is not there
c10::Stream current_stream(int device = -1);
inline StreamKey current_key(int device = -1) { return key_of(current_stream(device)); }

// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(int64_t index) : before_(thread_state().device) {
    check_device(index);
    thread_state().device = static_cast<int>(index);
  }
  ~OnDevice() { thread_state().device = before_; }
  OnDevice(const OnDevice&) = delete;

 private:
  int before_;
};

c10::Allocator* device_allocator();
const at::Generator& default_generator(int device);
at::Generator host_generator(const at::Generator& of_device);  // the CPU generator that draws for it

inline bool is_on_device(const at::Tensor& t) { return t.defined() && t.device().type() == c10::kCUDA; }

at::Tensor host_alias(const at::Tensor& t);  // the same memory as a CPU tensor
size_t span_nbytes(const at::Tensor& t);     // from the first element to the last, gaps included
void touch_tensor(const at::Tensor& t, bool write, StreamKey stream, uint64_t epoch, const std::string& op);

}  // namespace standin
