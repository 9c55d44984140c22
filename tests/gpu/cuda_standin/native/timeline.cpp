// Vector clocks, the race check, and copies that run as late as they may: see timeline.h.
#include "timeline.h"

#include <Python.h>

#include <algorithm>
#include <cstring>

namespace standin {

namespace {

// The entry of a map of ranges (begin -> ...) that starts at or before the address, or the map's end.
template <typename Ranges>
auto range_at(Ranges& ranges, const void* pointer) {
  auto found = ranges.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  return found == ranges.begin() ? ranges.end() : std::prev(found);
}

}  // namespace

void Mutex::lock() {
  if (mutex_.try_lock()) return;
  if (Py_IsInitialized() && PyGILState_Check()) {
    auto* state = PyEval_SaveThread();
    mutex_.lock();
    PyEval_RestoreThread(state);
  } else {
    mutex_.lock();
  }
}

Timeline& Timeline::get() {
  static auto* timeline = new Timeline();  // never destroyed: memory is freed after the end of main as well
  return *timeline;
}

// -- clocks

void Timeline::join(Clock& into, const Clock& from) {
  for (const auto& [stream, epoch] : from) {
    auto& known = into[stream];
    known = std::max(known, epoch);
  }
}

uint64_t Timeline::begin_op(StreamKey stream) {
  auto& clock = streams_[stream];
  join(clock, host_);
  launches_++;
  return ++clock[stream];
}

Clock Timeline::mark(StreamKey stream) {
  auto clock = streams_[stream];
  clock[stream];
  return clock;
}

bool Timeline::knows(StreamKey stream, const Access& access) {
  if (stream == access.stream) return true;
  const auto& clock = streams_[stream];
  auto found = clock.find(access.stream);
  return found != clock.end() && found->second >= access.epoch;
}

bool Timeline::host_knows_of(const Access& access) const {
  auto found = host_.find(access.stream);
  return found != host_.end() && found->second >= access.epoch;
}

void Timeline::error(const std::string& text) {
  errors_.push_back(text);
  if (complain) complain(text);
}

// -- the race check

void Timeline::touch(uintptr_t begin, size_t nbytes, bool write, StreamKey stream, uint64_t epoch, const std::string& op) {
  if (!nbytes) return;
  const uintptr_t end = begin + nbytes;
  run_overlapping(begin, end);
  if (!track) return;
  std::vector<Access> kept;
  kept.reserve(accesses_.size() + 1);
  for (auto& access : accesses_) {
    if (access.end <= begin || end <= access.begin) {
      kept.push_back(std::move(access));
      continue;
    }
    const bool ordered = knows(stream, access);
    if ((access.write || write) && !ordered) {
      error("race: " + op + (write ? " writes" : " reads") + " on stream " + std::to_string(stream) + " what " + access.op +
            (access.write ? " writes" : " reads") + " on stream " + std::to_string(access.stream) + ", bytes " +
            std::to_string(nbytes));
    }
    // who is ordered after this access is ordered after the covered one as well
    const bool covered = begin <= access.begin && access.end <= end;
    const bool superseded = (write && ordered) || (access.stream == stream && access.write == write);
    if (!(covered && superseded)) kept.push_back(std::move(access));
  }
  kept.push_back({begin, end, stream, epoch, write, op});
  accesses_.swap(kept);
}

// -- memory

void Timeline::allocated_block(void* pointer, size_t nbytes, size_t counted, StreamKey stream, int device) {
  Guarded guard(lock);
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  blocks_[begin] = {begin, nbytes, counted, stream, device, {}};
  allocated[device] += counted;
  peak[device] = std::max(peak[device], allocated[device]);
}

void Timeline::freed_block(void* pointer) {
  Guarded guard(lock);
  auto found = blocks_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks_.end()) return;
  const Block block = found->second;
  const uintptr_t end = block.begin + block.nbytes;
  std::vector<Access> kept;
  for (auto& access : accesses_) {
    if (access.end <= block.begin || end <= access.begin) {
      kept.push_back(std::move(access));
      continue;
    }
    bool safe = knows(block.stream, access) || host_knows_of(access);
    for (auto stream : block.recorded) safe = safe || knows(stream, access);
    if (!safe) {
      error("free: memory of stream " + std::to_string(block.stream) + " is freed while stream " +
            std::to_string(access.stream) + " may still run " + access.op + " on it (" + std::to_string(block.nbytes) +
            " bytes, no record_stream)");
    }
  }
  accesses_.swap(kept);
  std::erase_if(pending_, [&](const PendingCopy& copy) {
    const auto at = reinterpret_cast<uintptr_t>(copy.destination);
    return copy.to_device && at < end && block.begin < at + copy.nbytes;
  });
  allocated[block.device] -= block.counted;
  blocks_.erase(found);
}

void Timeline::record_stream(void* pointer, StreamKey stream) {
  Guarded guard(lock);
  auto found = range_at(blocks_, pointer);
  if (found == blocks_.end()) return;
  Block& block = found->second;
  if (reinterpret_cast<uintptr_t>(pointer) < block.begin + block.nbytes) block.recorded.insert(stream);
}

void Timeline::pin(uintptr_t pointer, size_t nbytes) {
  Guarded guard(lock);
  pinned_[pointer] = nbytes;
}

bool Timeline::unpin(uintptr_t pointer) {
  Guarded guard(lock);
  return pinned_.erase(pointer) > 0;
}

bool Timeline::is_pinned(const void* pointer) {
  Guarded guard(lock);
  auto found = range_at(pinned_, pointer);
  return found != pinned_.end() && reinterpret_cast<uintptr_t>(pointer) < found->first + found->second;
}

// -- late copies

void Timeline::run(PendingCopy& copy) {
  auto alive = copy.host.lock();
  if (!alive || !alive->data() || alive->mutable_data() != copy.host_base) {
    error("host: memory of a copy (" + copy.op + ") was freed before the copy ran");
    return;
  }
  std::memcpy(copy.destination, copy.to_device ? copy.source : copy.taken.data(), copy.nbytes);
  late_++;
}

// In stream order: what is due, and all that stands before it on its stream.
void Timeline::run_due(const std::function<bool(const PendingCopy&)>& due) {
  std::map<StreamKey, uint64_t> last;
  for (const auto& copy : pending_) {
    if (due(copy)) last[copy.stream] = std::max(last[copy.stream], copy.epoch);
  }
  if (last.empty()) return;
  std::deque<PendingCopy> left, now;
  for (auto& copy : pending_) {
    auto found = last.find(copy.stream);
    const bool runs = found != last.end() && copy.epoch <= found->second;
    (runs ? now : left).push_back(std::move(copy));
  }
  pending_.swap(left);
  for (auto& copy : now) run(copy);
}

void Timeline::run_overlapping(uintptr_t begin, uintptr_t end) {
  run_due([&](const PendingCopy& copy) {
    const auto hits = [&](void* pointer) {
      const auto at = reinterpret_cast<uintptr_t>(pointer);
      return at < end && begin < at + copy.nbytes;
    };
    return hits(copy.destination) || (copy.to_device && hits(copy.source));
  });
}

// -- the host waits

void Timeline::host_knows(const Clock& clock) {
  Guarded guard(lock);
  join(host_, clock);
  run_due([&](const PendingCopy& copy) {
    auto found = host_.find(copy.stream);
    return found != host_.end() && found->second >= copy.epoch;
  });
}

void Timeline::note_sync(const std::string& why) {
  syncs_++;
  if (on_sync) on_sync(why);
}

void Timeline::synchronize(StreamKey stream, const std::string& why) {
  Guarded guard(lock);
  note_sync(why);
  host_knows(mark(stream));
}

void Timeline::synchronize_event(const Clock& clock) {
  Guarded guard(lock);
  note_sync("event");
  host_knows(clock);
}

void Timeline::synchronize_all(const std::string& why) {
  Guarded guard(lock);
  note_sync(why);
  const auto streams = streams_;
  for (const auto& [stream, clock] : streams) host_knows(clock);
}

bool Timeline::is_over(const Clock& clock) {
  Guarded guard(lock);
  const bool over = std::all_of(clock.begin(), clock.end(), [&](const auto& entry) {
    auto found = host_.find(entry.first);
    return found != host_.end() && found->second >= entry.second;
  });
  if (over || ++queries_ % 2) return over;
  host_knows(clock);
  return true;
}

// -- what is seen from outside

std::vector<std::string> Timeline::take_errors() {
  Guarded guard(lock);
  return std::exchange(errors_, {});
}

std::map<std::string, uint64_t> Timeline::counts() {
  Guarded guard(lock);
  return {{"syncs", syncs_},
          {"launches", launches_},
          {"late copies", late_},
          {"pending", pending_.size()},
          {"accesses", accesses_.size()}};
}

}  // namespace standin
