// Order on the stand-in device: streams as vector clocks, a race check per range of memory, copies that run late.
//
// Every operation on a stream advances that stream's own entry ("epoch") in its clock. Waiting for an event joins the
// event's clock into the waiter's. An access to memory is ordered after another when the accessing stream's clock has
// reached the other's epoch; if it has not, and one of both writes, a real device could run them in either order: a race.
//
// Kernels run at once, on the host, so their results are always those of the right order. What is wrong is complained of.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace standin {

using StreamKey = int64_t;                      // a stream of a device: see key_of
using Clock = std::map<StreamKey, uint64_t>;    // stream -> the epoch up to which it is known to be over

constexpr int kMaxDevices = 8;
constexpr int kKeyStride = 64;                  // more than kMaxDevices, so that (stream id, device) is one number

inline StreamKey key_of(c10::Stream stream) { return stream.id() * kKeyStride + stream.device_index(); }

// Complaints are made in Python while this is held: who waits for it must not hold the interpreter's lock.
class Mutex {
 public:
  void lock();
  void unlock() { mutex_.unlock(); }

 private:
  std::recursive_mutex mutex_;
};
using Guarded = std::lock_guard<Mutex>;

// One operation's use of a range of memory, kept until a later one makes it irrelevant.
struct Access {
  uintptr_t begin, end;
  StreamKey stream;
  uint64_t epoch;
  bool write;
  std::string op;
};

// Memory from the device's allocator.
struct Block {
  uintptr_t begin;
  size_t nbytes, counted;  // asked for; rounded up as the real allocator does
  StreamKey stream;        // on which it was allocated, and on which the allocator would hand it out again
  int device;
  std::set<StreamKey> recorded;  // record_stream
};

// A copy between pinned host memory and the device that has not run yet.
struct PendingCopy {
  bool to_device;
  StreamKey stream;
  uint64_t epoch;
  void* destination;
  void* source;
  size_t nbytes;
  c10::weak_intrusive_ptr<c10::StorageImpl> host;  // must still be there when the copy runs
  void* host_base;
  std::vector<char> taken;  // copies to the host: what the device held when they were queued (kernels run at once)
  std::string op;
};

class Timeline {
 public:
  using Report = std::function<void(const std::string&)>;
  static Timeline& get();

  // -- order: callers hold `lock`
  uint64_t begin_op(StreamKey stream);  // a launch: knows all that the host knew; returns its epoch
  Clock mark(StreamKey stream);
  void join_stream(StreamKey stream, const Clock& clock) { join(streams_[stream], clock); }
  void touch(uintptr_t begin, size_t nbytes, bool write, StreamKey stream, uint64_t epoch, const std::string& op);
  void queue(PendingCopy copy) { pending_.push_back(std::move(copy)); }

  // -- the host waits: these take `lock`
  void host_knows(const Clock& clock);
  void synchronize(StreamKey stream, const std::string& why);
  void synchronize_event(const Clock& clock);
  void synchronize_all(const std::string& why);
  bool is_over(const Clock& clock);  // a query: true every second time at the latest, so that polling ends

  // -- memory: these take `lock`
  void allocated_block(void* pointer, size_t nbytes, size_t counted, StreamKey stream, int device);
  void freed_block(void* pointer);
  void record_stream(void* pointer, StreamKey stream);
  void pin(uintptr_t pointer, size_t nbytes);
  bool unpin(uintptr_t pointer);
  bool is_pinned(const void* pointer);

  std::vector<std::string> take_errors();
  std::map<std::string, uint64_t> counts();
  int64_t new_stream_id() { return next_stream_++; }

  Mutex lock;
  Report complain;  // a fault of order
  Report on_sync;   // the host waits for the device
  size_t allocated[kMaxDevices] = {0}, peak[kMaxDevices] = {0}, capacity = size_t(8) << 30;
  bool track = true;  // check for races
  bool delay = true;  // run copies late

 private:
  static void join(Clock& into, const Clock& from);
  bool knows(StreamKey stream, const Access& access);
  bool host_knows_of(const Access& access) const;
  void error(const std::string& text);
  void note_sync(const std::string& why);
  void run(PendingCopy& copy);
  void run_due(const std::function<bool(const PendingCopy&)>& due);
  void run_overlapping(uintptr_t begin, uintptr_t end);

  std::map<StreamKey, Clock> streams_;
  Clock host_;  // one for all host threads: too lenient towards threads that do not wait for each other (README.md)
  std::map<uintptr_t, Block> blocks_;
  std::map<uintptr_t, size_t> pinned_;
  std::vector<Access> accesses_;
  std::deque<PendingCopy> pending_;  // in the order of launches
  std::vector<std::string> errors_;
  uint64_t syncs_ = 0, queries_ = 0, launches_ = 0, late_ = 0, next_stream_ = 1;
};

}  // namespace standin
