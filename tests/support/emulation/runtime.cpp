// SPDX-License-Identifier: MIT
// Runs a grid of CUDA threads, each a fiber, in one thread of the host (x86-64, Linux).
//
// Blocks run one after the other, or the blocks of a cluster together. Where all that
// run wait for what others write, more blocks start; where there are none left, or
// nothing happens for long, the launch ends with an error that says who waits where.
// Shared memory is poisoned before a block, and so are the targets of copies under way.
#include <dlfcn.h>
#include <fenv.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "language.h"

extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch, .-emu_switch
)");

namespace emu {

constexpr size_t kStack = 256 << 10, kPage = 4096;
constexpr int kMaxBarriers = 16;
constexpr unsigned char kPoison = 0xff;
constexpr unsigned kBehind = 1 << 10;  // bytes behind dynamic shared memory, watched
constexpr long kMaxIdleRounds = 2000;

struct cluster_t;
struct warp_t;

struct copy_t {
  unsigned char* target;
  const unsigned char* source;
  unsigned bytes, copied;
  unsigned long group;
};

struct fiber_t : thread_t {
  void* stack_pointer;
  void* stack;
  warp_t* warp;
  const char* waits_for;
  bool value, has_ended;
  std::vector<copy_t> copies;  // under way
  unsigned long group = 0;     // that is open
  unsigned long cluster_phase = 0;
};

struct meeting_t {
  unsigned mask, come;
  act_t act;
  void* arguments[32];
};

struct warp_t {
  unsigned ended = 0;
  fiber_t* lanes[32] = {};
  meeting_t of_all = {~0u, 0, nullptr, {}};  // while come is not 0
  std::vector<meeting_t> meetings;           // of some lanes
};

struct barrier_t {
  unsigned come = 0, expected = 0;
  bool any = false;
  std::vector<fiber_t*> waiting;
};

struct group_meeting_t {
  unsigned come = 0;
  void (*act)(void**) = nullptr;
  void* arguments[128];
  fiber_t* fibers[128];
};

struct block_t {
  cluster_t* cluster;
  dim_t index;
  unsigned rank, left;
  unsigned char* shared;
  std::vector<fiber_t> fibers;
  std::vector<warp_t> warps;
  barrier_t barriers[kMaxBarriers];
  std::vector<group_meeting_t> warpgroups;
};

struct cluster_t {
  unsigned char* memory;
  std::vector<std::unique_ptr<block_t>> blocks;
  unsigned left = 0, arrived = 0;
  unsigned long phase = 0;
  std::vector<fiber_t*> waiting;
};

thread_t* self = nullptr;
dim_t grid_dim, block_dim;
unsigned char* cluster_memory = nullptr;
unsigned dynamic_start;

namespace {

void* main_stack_pointer;
// Threads that may go on, in a ring that grows.
struct queue_t {
  std::vector<fiber_t*> ring = std::vector<fiber_t*>(1 << 10);
  size_t first = 0, end = 0;

  bool empty() const { return first == end; }
  void clear() { first = end = 0; }
  fiber_t* pop_front() { return ring[first++ & (ring.size() - 1)]; }
  fiber_t* pop_back() { return ring[--end & (ring.size() - 1)]; }
  void push_back(fiber_t* fiber) {
    if (end - first == ring.size()) {
      std::vector<fiber_t*> larger(2 * ring.size());
      for (size_t n = first; n < end; ++n)
        larger[n - first] = ring[n & (ring.size() - 1)];
      end -= first;
      first = 0;
      ring.swap(larger);
    }
    ring[end++ & (ring.size() - 1)] = fiber;
  }
};
queue_t ready;
std::vector<fiber_t*> spinning;
unsigned long num_events, spun_at;
long idle_rounds;
char error[1024];
bool has_failed;
sigjmp_buf back;
const launch_t* launch;
void (*kernel)(void**);
void** arguments;
std::vector<void*> free_stacks;
std::vector<unsigned char*> free_windows;  // memory of a cluster
std::vector<std::unique_ptr<cluster_t>> clusters;
unsigned long num_clusters, num_started;
bool is_running = false;

fiber_t* me() { return static_cast<fiber_t*>(self); }

void* new_stack() {
  if (!free_stacks.empty()) {
    void* stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
  }
  void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for the stack of a thread");
  mprotect(memory, kPage, PROT_NONE);
  return memory;
}

unsigned char* new_window() {
  if (!free_windows.empty()) {
    unsigned char* window = free_windows.back();
    free_windows.pop_back();
    return window;
  }
  void* memory = mmap(nullptr, 17ul * kWindow, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no shared memory");
  return reinterpret_cast<unsigned char*>(
      (reinterpret_cast<uintptr_t>(memory) + kWindow - 1) / kWindow * kWindow);
}

void make_current(fiber_t* fiber) {
  self = fiber;
  cluster_memory = fiber->of->cluster->memory;
}

fiber_t* take_ready() {
  return launch->last_first ? ready.pop_back() : ready.pop_front();
}

// Goes on with another thread; comes back when this one is ready again and its turn
// comes.
void leave() {
  fiber_t* const from = me();
  if (ready.empty()) {
    emu_switch(&from->stack_pointer, main_stack_pointer);
    return;
  }
  fiber_t* const next = take_ready();
  if (next == from) return;
  make_current(next);
  emu_switch(&from->stack_pointer, next->stack_pointer);
}

void wake(fiber_t* fiber) {
  fiber->waits_for = nullptr;
  ready.push_back(fiber);
}

void finish_barrier(barrier_t& barrier) {
  const bool any = barrier.any;
  for (fiber_t* fiber : barrier.waiting) {
    fiber->value = any;
    wake(fiber);
  }
  barrier.waiting.clear();
  barrier.come = barrier.expected = 0;
  barrier.any = false;
}

unsigned expected_at(const barrier_t& barrier, const block_t& block) {
  return barrier.expected == ~0u ? block.left : barrier.expected;
}

// Makes the copies of this thread whose groups stand before `end`.
void copy_before(unsigned long end) {
  auto& copies = me()->copies;
  size_t n = 0;
  for (; n < copies.size() && copies[n].group < end; ++n) {
    const copy_t& copy = copies[n];
    memcpy(copy.target, copy.source, copy.copied);
    memset(copy.target + copy.copied, 0, copy.bytes - copy.copied);
  }
  copies.erase(copies.begin(), copies.begin() + n);
}

void look(cluster_t& cluster) {
  if (cluster.arrived < cluster.left || cluster.left == 0) return;
  cluster.arrived = 0;
  ++cluster.phase;
  ++num_events;
  for (fiber_t* fiber : cluster.waiting) wake(fiber);
  cluster.waiting.clear();
}

void start() {
  kernel(arguments);
  fiber_t* const fiber = me();
  copy_before(~0ul);
  fiber->has_ended = true;
  block_t& block = *fiber->of;
  fiber->warp->ended |= 1u << (fiber->number % 32);
  if (fiber->warp->of_all.come)
    fail("a lane has ended that others of its warp wait for");
  for (const meeting_t& meeting : fiber->warp->meetings) {
    if (meeting.mask >> (fiber->number % 32) & 1) {
      fail("a lane has ended that others of its warp wait for");
    }
  }
  ++num_events;
  --block.left;
  --block.cluster->left;
  barrier_t& all = block.barriers[0];
  if (all.expected == ~0u && all.come && all.come >= block.left) finish_barrier(all);
  if (block.cluster->arrived) look(*block.cluster);
  leave();
  __builtin_unreachable();
}

void start_fiber(fiber_t& fiber) {
  fiber.stack = new_stack();
  auto* top = reinterpret_cast<void**>(static_cast<char*>(fiber.stack) + kStack);
  *--top = nullptr;  // the stack of a function begins 8 bytes past a multiple of 16
  *--top = reinterpret_cast<void*>(&start);
  for (int n = 0; n < 6; ++n) *--top = nullptr;
  fiber.stack_pointer = top;
}

void start_cluster() {
  const unsigned long first = num_started++ * launch->cluster;
  clusters.push_back(std::make_unique<cluster_t>());
  cluster_t& cluster = *clusters.back();
  cluster.memory = new_window();
  const unsigned num_threads = launch->block.x * launch->block.y * launch->block.z;
  for (unsigned rank = 0; rank < launch->cluster; ++rank) {
    cluster.blocks.push_back(std::make_unique<block_t>());
    block_t& block = *cluster.blocks.back();
    const unsigned long n = first + rank;
    block.cluster = &cluster;
    block.rank = rank;
    block.index = {unsigned(n % launch->grid.x),
                   unsigned(n / launch->grid.x % launch->grid.y),
                   unsigned(n / launch->grid.x / launch->grid.y)};
    block.shared = cluster.memory + size_t(rank) * kWindow;
    memset(block.shared, kPoison, *launch->reserved);
    memset(block.shared + dynamic_start, kPoison, launch->smem + kBehind);
    block.left = num_threads;
    block.fibers.resize(num_threads);
    block.warps.resize((num_threads + 31) / 32);
    block.warpgroups.resize((num_threads + 127) / 128);
    for (unsigned t = 0; t < num_threads; ++t) {
      fiber_t& fiber = block.fibers[t];
      fiber.thread = {t % launch->block.x, t / launch->block.x % launch->block.y,
                      t / launch->block.x / launch->block.y};
      fiber.block = block.index;
      fiber.number = t;
      fiber.shared = block.shared;
      fiber.of = &block;
      fiber.warp = &block.warps[t / 32];
      fiber.warp->lanes[t % 32] = &fiber;
      fiber.waits_for = nullptr;
      fiber.has_ended = false;
      start_fiber(fiber);
      ready.push_back(&fiber);
    }
    cluster.left += num_threads;
  }
}

void give_back(cluster_t& cluster) {
  for (auto& block : cluster.blocks) {
    for (fiber_t& fiber : block->fibers) free_stacks.push_back(fiber.stack);
    const unsigned char* const end = block->shared + dynamic_start + launch->smem;
    for (unsigned n = 0; n < kBehind && !has_failed; ++n) {
      if (end[n] == kPoison) continue;
      snprintf(error, sizeof(error),
               "%s: block (%u, %u, %u) wrote byte %u of %u bytes of "
               "dynamic shared memory",
               launch->name, block->index.x, block->index.y, block->index.z,
               launch->smem + n, launch->smem);
      has_failed = true;
    }
  }
  free_windows.push_back(cluster.memory);
}

void describe_waiting() {
  size_t at = strlen(error);
  int told = 0;
  for (const auto& cluster : clusters) {
    for (const auto& block : cluster->blocks) {
      for (const fiber_t& fiber : block->fibers) {
        if (fiber.has_ended || told == 12 || at + 100 > sizeof(error)) continue;
        if (fiber.number % 32 && told > 2) continue;
        ++told;
        at += snprintf(error + at, sizeof(error) - at, "\n  block %u thread %u: %s",
                       block->index.x, fiber.number,
                       fiber.waits_for ? fiber.waits_for : "spins");
      }
    }
  }
}

void run_all() {
  for (;;) {
    while (!ready.empty()) {
      fiber_t* const next = take_ready();
      make_current(next);
      emu_switch(&main_stack_pointer, next->stack_pointer);
      if (has_failed) return;
    }
    for (size_t n = 0; n < clusters.size();) {
      if (clusters[n]->left) {
        ++n;
        continue;
      }
      give_back(*clusters[n]);
      clusters.erase(clusters.begin() + n);
      ++num_events;
    }
    if (has_failed) return;
    const bool is_new = spun_at != num_events;
    idle_rounds = is_new ? 0 : idle_rounds + 1;
    spun_at = num_events;
    const bool may_start = num_started < num_clusters;
    if (clusters.empty() && !may_start) return;
    if (may_start && (clusters.empty() || spinning.empty() || idle_rounds > 2)) {
      start_cluster();
    } else if (spinning.empty() || idle_rounds > kMaxIdleRounds) {
      snprintf(error, sizeof(error), "%s: threads wait for what never comes",
               launch->name);
      describe_waiting();
      has_failed = true;
      return;
    }
    for (fiber_t* fiber : spinning) ready.push_back(fiber);
    spinning.clear();
  }
}

// A GPU goes on after a division of integers by 0: the quotient is all ones, and the
// remainder is what was divided.
bool pass_division(ucontext_t* context) {
  auto* const registers = context->uc_mcontext.gregs;
  auto* const code = reinterpret_cast<const unsigned char*>(registers[REG_RIP]);
  int at = (code[0] & 0xf0) == 0x40;  // a prefix
  const bool is_wide = at && code[0] & 8;
  if (code[at] != 0xf7) return false;
  const unsigned char operand = code[++at];
  const int mode = operand >> 6, base = operand & 7;
  ++at;
  if (mode != 3 && base == 4) {
    if (mode == 0 && (code[at] & 7) == 5) at += 4;
    ++at;
  }
  if (mode == 0 && base == 5) at += 4;
  at += mode == 1 ? 1 : mode == 2 ? 4 : 0;
  const unsigned long long all = is_wide ? ~0ull : 0xffffffffull;
  registers[REG_RDX] = static_cast<greg_t>(registers[REG_RAX] & all);
  registers[REG_RAX] = static_cast<greg_t>(all);
  registers[REG_RIP] += at;
  return true;
}

void on_signal(int number, siginfo_t* info, void* context) {
  if (!is_running) {
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  if (number == SIGFPE && pass_division(static_cast<ucontext_t*>(context))) return;
  const char* const what =
      number == SIGILL ? "undefined behaviour" : "no memory, or not aligned";
  // The instruction, as a place in its library: stand_in.py finds its line.
  const auto at = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  Dl_info library{};
  dladdr(reinterpret_cast<void*>(at), &library);
  snprintf(error, sizeof(error),
           "%s: %s (address %p) at %s+0x%llx, thread %u of block (%u, %u, %u)",
           launch->name, what, info->si_addr,
           library.dli_fname ? library.dli_fname : "",
           at - reinterpret_cast<long long>(library.dli_fbase), self->number,
           self->block.x, self->block.y, self->block.z);
  has_failed = true;
  siglongjmp(back, 1);
}

void watch_signals() {
  static char stack[1 << 16];
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof(stack);
  sigaltstack(&alternative, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE})
    sigaction(number, &action, nullptr);
}

}  // namespace

void fail(const char* format, ...) {
  int at = snprintf(error, sizeof(error), "%s: ", launch ? launch->name : "");
  va_list list;
  va_start(list, format);
  at += vsnprintf(error + at, sizeof(error) - at, format, list);
  va_end(list);
  if (self && size_t(at) < sizeof(error)) {
    snprintf(error + at, sizeof(error) - at, ", thread %u of block (%u, %u, %u)",
             self->number, self->block.x, self->block.y, self->block.z);
  }
  has_failed = true;
  siglongjmp(back, 1);
}

void progress() { ++num_events; }

void spin() {
  spinning.push_back(me());
  leave();
}

void meet(unsigned mask, void* of_lane, act_t act) {
  fiber_t* const fiber = me();
  warp_t& warp = *fiber->warp;
  const unsigned lane = fiber->number % 32, bit = 1u << lane;
  if (!(mask & bit)) fail("a lane that is not in the mask %08x it gives", mask);
  if (mask & warp.ended) fail("lanes of the mask %08x have ended", mask);
  meeting_t* found = nullptr;
  if (mask == ~0u && warp.meetings.empty()) {
    found = &warp.of_all;
    if (found->come && found->act != act)
      fail("lanes of a warp meet in different instructions");
    found->act = act;
  } else {
    if (warp.of_all.come) fail("lanes of a warp meet with different masks");
    for (meeting_t& meeting : warp.meetings) {
      if (meeting.mask == mask && meeting.act == act) {
        found = &meeting;
      } else if (meeting.mask & mask) {
        fail("lanes of a warp meet in different instructions or masks (%08x, %08x)",
             mask, meeting.mask);
      }
    }
    if (found == nullptr) {
      warp.meetings.push_back({mask, 0, act, {}});
      found = &warp.meetings.back();
    }
  }
  found->come |= bit;
  found->arguments[lane] = of_lane;
  if (found->come != mask) {
    fiber->waits_for = "at a shuffle, vote or product of its warp";
    leave();
    return;
  }
  act(found->arguments, mask);
  found->come = 0;
  if (found != &warp.of_all) {
    *found = warp.meetings.back();
    warp.meetings.pop_back();
  }
  for (unsigned n = 0; n < 32; ++n) {
    if (n != lane && mask >> n & 1) wake(warp.lanes[n]);
  }
}

void meet_warpgroup(void* of_thread, void (*act)(void**)) {
  fiber_t* const fiber = me();
  group_meeting_t& group = fiber->of->warpgroups[fiber->number / 128];
  if (group.come && group.act != act)
    fail("warps of a warpgroup meet at different wgmma");
  group.act = act;
  const unsigned n = fiber->number % 128;
  group.arguments[n] = of_thread;
  group.fibers[n] = fiber;
  if (++group.come < 128) {
    fiber->waits_for = "at a product of its warpgroup";
    leave();
    return;
  }
  act(group.arguments);
  group.come = 0;
  for (unsigned t = 0; t < 128; ++t) {
    if (t != n) wake(group.fibers[t]);
  }
}

bool barrier(int id, unsigned num_threads, bool value) {
  fiber_t* const fiber = me();
  if (id < 0 || id >= kMaxBarriers) fail("barrier %d", id);
  barrier_t& at = fiber->of->barriers[id];
  const unsigned expected = num_threads == 0 ? ~0u : num_threads;
  if (at.come && at.expected != expected) fail("barrier %d of two sizes", id);
  at.expected = expected;
  at.any |= value;
  ++at.come;
  at.waiting.push_back(fiber);
  if (at.come > expected_at(at, *fiber->of)) fail("too many threads at barrier %d", id);
  if (at.come == expected_at(at, *fiber->of)) {
    finish_barrier(at);
  } else {
    static const char* const names[kMaxBarriers] = {
        "at __syncthreads()", "at barrier 1",  "at barrier 2",  "at barrier 3",
        "at barrier 4",       "at barrier 5",  "at barrier 6",  "at barrier 7",
        "at barrier 8",       "at barrier 9",  "at barrier 10", "at barrier 11",
        "at barrier 12",      "at barrier 13", "at barrier 14", "at barrier 15"};
    fiber->waits_for = names[id];
  }
  leave();
  return fiber->value;
}

void barrier_arrive(int id, unsigned num_threads, unsigned weight) {
  block_t& block = *me()->of;
  barrier_t& at = block.barriers[id];
  if (at.come && at.expected != num_threads) fail("barrier %d of two sizes", id);
  at.expected = num_threads;
  at.come += weight;
  if (at.come > num_threads) fail("too many threads at barrier %d", id);
  if (at.come == num_threads) finish_barrier(at);
}

void cluster_arrive() {
  cluster_t& cluster = *me()->of->cluster;
  me()->cluster_phase = cluster.phase;
  ++cluster.arrived;
  look(cluster);
}

void cluster_wait() {
  fiber_t* const fiber = me();
  cluster_t& cluster = *fiber->of->cluster;
  if (cluster.phase != fiber->cluster_phase) return;
  fiber->waits_for = "at the barrier of its cluster";
  cluster.waiting.push_back(fiber);
  leave();
}

unsigned cluster_rank() { return me()->of->rank; }

// --- barriers in shared memory
// ------------------------------------------------------------

namespace {

struct mbarrier_t {
  unsigned phase : 1, valid : 7;
  unsigned count : 12, pending : 12;
  int bytes;
};
static_assert(sizeof(mbarrier_t) == 8);
constexpr unsigned kValid = 0x2a;

mbarrier_t& as_mbarrier(void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 8) fail("an mbarrier is not aligned");
  auto& barrier = *static_cast<mbarrier_t*>(p);
  if (barrier.valid != kValid) fail("an mbarrier that is not initialised");
  return barrier;
}

void look(mbarrier_t& barrier) {
  ++num_events;
  if (barrier.pending || barrier.bytes) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
}

}  // namespace

void mbarrier_init(void* p, unsigned count) {
  if (count == 0 || count > 4095) fail("an mbarrier of %u arrivals", count);
  auto& barrier = *static_cast<mbarrier_t*>(p);
  barrier.phase = 0;
  barrier.valid = kValid;
  barrier.count = barrier.pending = count;
  barrier.bytes = 0;
}

void mbarrier_end(void* p) {
  as_mbarrier(p);
  memset(p, kPoison, 8);
}

void mbarrier_arrive(void* p) {
  mbarrier_t& barrier = as_mbarrier(p);
  if (barrier.pending == 0) fail("too many arrivals at an mbarrier");
  --barrier.pending;
  look(barrier);
}

void mbarrier_expect(void* p, unsigned bytes) { as_mbarrier(p).bytes += int(bytes); }

void mbarrier_complete(void* p, unsigned bytes) {
  mbarrier_t& barrier = as_mbarrier(p);
  barrier.bytes -= int(bytes);
  look(barrier);
}

bool mbarrier_is_over(void* p, unsigned parity) {
  if (as_mbarrier(p).phase != (parity & 1)) return true;
  spin();
  return as_mbarrier(p).phase != (parity & 1);
}

// --- copies
// -------------------------------------------------------------------------------

void copy_async(void* shared, const void* global, unsigned bytes, unsigned copied) {
  if (reinterpret_cast<uintptr_t>(shared) % bytes ||
      (reinterpret_cast<uintptr_t>(global) % bytes && copied)) {
    fail("cp.async of %u bytes from %p to %p is not aligned", bytes, global, shared);
  }
  address_of(shared);
  if (copied > bytes) fail("cp.async of %u bytes copies %u", bytes, copied);
  memset(shared, kPoison, bytes);
  me()->copies.push_back({static_cast<unsigned char*>(shared),
                          static_cast<const unsigned char*>(global), bytes, copied,
                          me()->group});
}

void commit_copies() { ++me()->group; }

void wait_copy_groups(unsigned pending) {
  const unsigned long group = me()->group;
  if (group > pending) copy_before(group - pending);
}

void wait_copies() { copy_before(~0ul); }

unsigned reserve_shared(unsigned& reserved, unsigned bytes, unsigned alignment) {
  const unsigned at = (reserved + alignment - 1) / alignment * alignment;
  if (at + bytes > dynamic_start) fail("too much static shared memory");
  reserved = at + bytes;
  // The first thread that comes here reserves it: poison it for all that run.
  for (auto& cluster : clusters) {
    for (auto& block : cluster->blocks) memset(block->shared + at, kPoison, bytes);
  }
  return at;
}

// --- numbers
// ------------------------------------------------------------------------------

namespace {
constexpr int kModes[] = {FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
}

__attribute__((noinline)) double rounded(double a, double b, char, int mode) {
  fesetround(kModes[mode]);
  volatile float x = static_cast<float>(a), y = static_cast<float>(b);
  volatile float z = x - y;
  fesetround(FE_TONEAREST);
  return z;
}

__attribute__((noinline)) float narrowed(double x, int mode) {
  fesetround(kModes[mode]);
  volatile double given = x;
  volatile float y = static_cast<float>(given);
  fesetround(FE_TONEAREST);
  return y;
}

extern "C" const char* emu_run(const launch_t* of, void (*entry)(void**),
                               void** given) {
  static bool is_watching = (watch_signals(), true);
  (void)is_watching;
  launch = of;
  kernel = entry;
  arguments = given;
  grid_dim = of->grid;
  block_dim = of->block;
  // Addresses of shared memory have 18 bits in what wgmma is told of it.
  dynamic_start = of->smem > (200u << 10) ? 28 << 10 : 48 << 10;
  has_failed = false;
  error[0] = 0;
  idle_rounds = 0;
  num_started = 0;
  num_clusters = static_cast<unsigned long>(of->grid.x) * of->grid.y * of->grid.z;
  if (num_clusters % of->cluster) return "a grid that is no multiple of its clusters";
  num_clusters /= of->cluster;
  is_running = true;
  if (sigsetjmp(back, 1) == 0) {
    while (of->all_at_once && num_started < num_clusters) start_cluster();
    run_all();
  }
  is_running = false;
  self = nullptr;
  if (has_failed) {
    ready.clear();
    spinning.clear();
    for (auto& cluster : clusters) give_back(*cluster);
    clusters.clear();
  }
  return has_failed ? error : nullptr;
}

}  // namespace emu
