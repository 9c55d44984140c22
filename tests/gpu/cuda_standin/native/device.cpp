// Memory, streams, events, generators and hooks: what torch asks of a CUDA device.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

namespace standin {

ThreadState& thread_state() {
  static thread_local ThreadState state;
  return state;
}

int device_count() {
  static const int count = [] {
    const char* given = std::getenv("CUDA_STANDIN_DEVICES");
    return given ? std::atoi(given) : 1;
  }();
  return count;
}

void check_device(int64_t index) {
  TORCH_CHECK(index < device_count() && index < kMaxDevices, "CUDA error: invalid device ordinal");
}

static int index_or_current(int64_t index) { return index < 0 ? thread_state().device : static_cast<int>(index); }

c10::Stream current_stream(int device) {
  device = index_or_current(device);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), thread_state().stream[device]);
}

// -- tensors over the device's memory

at::Tensor host_alias(const at::Tensor& t) {
  if (!t.defined()) return t;
  const auto& storage = t.unsafeGetTensorImpl()->storage();
  c10::DataPtr data(const_cast<void*>(storage.data()), nullptr, [](void*) {}, c10::Device(c10::kCPU));
  c10::Storage on_host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(on_host), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  impl->_set_conj(t.is_conj());
  impl->_set_neg(t.is_neg());
  return alias;
}

size_t span_nbytes(const at::Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t numel = 1;
  for (int64_t dim = 0; dim < t.dim(); dim++) numel += (t.size(dim) - 1) * t.stride(dim);
  return numel * t.element_size();
}

void touch_tensor(const at::Tensor& t, bool write, StreamKey stream, uint64_t epoch, const std::string& op) {
  if (!t.defined() || t.layout() != at::kStrided || t.numel() == 0) return;
  const auto base = reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()->storage().data());
  Timeline::get().touch(base + t.storage_offset() * t.element_size(), span_nbytes(t), write, stream, epoch, op);
}

// -- memory

namespace {

constexpr size_t kBlockNbytes = 512;   // the rounding of CUDA's caching allocator
constexpr int kUnwritten = 0xFF;       // fresh memory: NaN in every floating-point dtype
constexpr size_t kPageNbytes = 4096;

void release(void* pointer) {
  if (!pointer) return;
  Timeline::get().freed_block(pointer);
  std::free(pointer);
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const int device = thread_state().device;
    const c10::Device where(c10::kCUDA, device);
    if (!nbytes) return {nullptr, nullptr, &release, where};
    const size_t counted = (nbytes + kBlockNbytes - 1) / kBlockNbytes * kBlockNbytes;
    auto& timeline = Timeline::get();
    TORCH_CHECK_WITH(OutOfMemoryError, timeline.allocated[device] + counted <= timeline.capacity,
                     "CUDA out of memory (stand-in): tried to allocate ", nbytes, " bytes");
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, kBlockNbytes, counted) == 0, "the host has no memory for the stand-in");
    std::memset(pointer, kUnwritten, counted);
    timeline.allocated_block(pointer, nbytes, counted, current_key(device), device);
    return {pointer, pointer, &release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Timeline::get().record_stream(data.get(), key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& timeline = Timeline::get();
    timeline.peak[device] = timeline.allocated[device];
  }
};

void release_pinned(void* pointer) {
  Timeline::get().unpin(reinterpret_cast<uintptr_t>(pointer));
  std::free(pointer);
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &release_pinned, c10::Device(c10::kCPU)};
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, kPageNbytes, nbytes) == 0, "the host has no memory to pin");
    std::memset(pointer, kUnwritten, nbytes);
    Timeline::get().pin(reinterpret_cast<uintptr_t>(pointer), nbytes);
    return {pointer, pointer, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceMemory();
  return allocator;
}

// -- devices, streams, events

namespace {

using Instant = std::chrono::steady_clock::time_point;

struct Event {
  Clock clock;
  Instant at;
};
Event& event_of(void* pointer) { return *static_cast<Event*>(pointer); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, thread_state().device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    thread_state().device = index_or_current(device.index());
  }
  void setDevice(c10::Device device) const override {
    check_device(device.index());
    uncheckedSetDevice(device);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, index_or_current(device.index())));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto& timeline = Timeline::get();
    Guarded guard(timeline.lock);
    const c10::Device where(c10::kCUDA, index_or_current(device.index()));
    return c10::Stream(c10::Stream::UNSAFE, where, timeline.new_stream_id());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    thread_state().stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& timeline = Timeline::get();
    Guarded guard(timeline.lock);
    return timeline.is_over(timeline.mark(key_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Timeline::get().synchronize(key_of(stream), "stream");
  }
  void synchronizeDevice(c10::DeviceIndex) const override { Timeline::get().synchronize_all("device"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Timeline::get().record_stream(data.get(), key_of(stream));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto& timeline = Timeline::get();
    Guarded guard(timeline.lock);
    timeline.begin_op(key_of(stream));
    event_of(*event) = {timeline.mark(key_of(stream)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto& timeline = Timeline::get();
    Guarded guard(timeline.lock);
    timeline.join_stream(key_of(stream), event_of(event).clock);
  }
  bool queryEvent(void* event) const override { return !event || Timeline::get().is_over(event_of(event).clock); }
  void synchronizeEvent(void* event) const override {
    if (event) Timeline::get().synchronize_event(event_of(event).clock);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event_of(second).at - event_of(first).at).count();
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// -- random numbers: a CPU generator with a seed of its own, so that host and device do not draw the same

namespace {

constexpr uint64_t kSeedShift = 1000003;

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator(kSeedShift);

  explicit DeviceGenerator(int device)
      : GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  static c10::DeviceType device_type() { return c10::kCUDA; }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed + kSeedShift); }
  uint64_t current_seed() const override { return inner.current_seed() - kSeedShift; }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static const auto generators = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < kMaxDevices; index++) made.push_back(at::make_generator<DeviceGenerator>(index));
    return made;
  }();
  return generators[index_or_current(device)];
}

at::Generator host_generator(const at::Generator& of_device) {
  return static_cast<DeviceGenerator*>(of_device.unsafeGetGeneratorImpl())->inner;
}

// -- the hooks by which the rest of torch reaches CUDA

namespace {

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  std::string showConfig() const override { return "stand-in"; }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(index_or_current(device));
  }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(c10::kCUDA, 0); }
  bool isPinnedPtr(const void* pointer) const override { return Timeline::get().is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedMemory();
    return allocator;
  }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }

  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return thread_state().device; }
  c10::DeviceIndex getCurrentDevice() const override { return thread_state().device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { thread_state().device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(thread_state().device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(thread_state().device, index_or_current(device));
  }
  void deviceSynchronize(c10::DeviceIndex) const override { Timeline::get().synchronize_all("device"); }
};

const bool allocator_is_set = [] {
  constexpr uint8_t above_all = 200;  // priority
  c10::SetAllocator(c10::kCUDA, device_allocator(), above_all);
  return true;
}();

}  // namespace

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace standin
