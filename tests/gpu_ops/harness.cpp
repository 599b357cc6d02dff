// Runs the kernels of offload/gpu_ops/kernels on the CPU, thread by thread; see shim.h. One shared
// library holds every kernel for every format.
#include <ucontext.h>

#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "adam.cuh"
#include "dequantize.cuh"
#include "experts.cuh"
#include "linear.cuh"
#include "records.cuh"

Place threadIdx, blockIdx, blockDim;

namespace {

constexpr int LANES = 32;
constexpr u64 STACK = 64 << 10;

enum At { READY, SHUFFLE, WAITING, DONE };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    At at;
    int mask;       // of the shuffle it is at
    u32 shuffles;   // so far: which of the two buffers is next
};

std::vector<Fiber> fibers;
std::vector<u32> boxes[2];
std::vector<std::pair<u64, u64>> regions;
std::function<void()> body;
ucontext_t scheduler;
int current = 0;
std::string failure;

void fail(const std::string& what) {
    if (failure.empty()) failure = what;
}

void enter() {
    body();
    fibers[current].at = DONE;
}

void suspend(At at) {
    Fiber& mine = fibers[current];
    mine.at = at;
    swapcontext(&mine.context, &scheduler);
}

void resume(int thread) {
    current = thread;
    threadIdx = {static_cast<u32>(thread), 0, 0};
    fibers[thread].at = READY;
    swapcontext(&scheduler, &fibers[thread].context);
}

// Lanes of a warp to their next shuffle, again and again, until they wait or are done.
void run_warp(int first) {
    for (;;) {
        for (int lane = 0; lane < LANES; ++lane)
            if (fibers[first + lane].at != DONE) resume(first + lane);
        const Fiber& one = fibers[first];
        for (int lane = 1; lane < LANES; ++lane) {
            const Fiber& other = fibers[first + lane];
            if (other.at != one.at || (one.at == SHUFFLE && other.mask != one.mask))
                return fail("lanes of a warp are at different shuffles or barriers");
        }
        if (one.at != SHUFFLE) return;
    }
}

void run_block(int threads, bool backwards) {
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        fiber.at = READY;
        fiber.shuffles = 0;
        makecontext(&fiber.context, enter, 0);
    }
    const int warps = threads / LANES;
    for (bool more = true; more && failure.empty();) {
        for (int i = 0; i < warps; ++i) {
            const int warp = backwards ? warps - 1 - i : i;
            if (fibers[warp * LANES].at != DONE) run_warp(warp * LANES);
        }
        int waiting = 0;
        for (int warp = 0; warp < warps; ++warp) waiting += fibers[warp * LANES].at == WAITING;
        if (waiting != 0 && waiting != warps) fail("some warps of a block wait at a barrier for ever");
        more = waiting != 0;
    }
}

template <class Args, class Block>
std::function<void()> with(const void* args, Block block) {
    return [args, block] { block(*static_cast<const Args*>(args)); };
}

template <class F, int T>
std::function<void()> of_format(const std::string& kernel, const void* args) {
    if (kernel == "linear") return with<LinearArgs>(args, linear_block<F, T>);
    if (kernel == "gate_up") return with<ExpertArgs>(args, gate_up_block<F, T>);
    if (kernel == "down") return with<ExpertArgs>(args, down_block<F, T>);
    if (kernel == "dequantize") return with<DequantizeArgs>(args, dequantize_block<F>);
    return {};
}

template <class F>
std::function<void()> of_tokens(const std::string& kernel, int tokens, const void* args) {
    return tokens == 1 ? of_format<F, 1>(kernel, args) : of_format<F, 4>(kernel, args);
}

std::function<void()> find(const std::string& kernel, const std::string& format, int tokens,
                           const void* args) {
    if (kernel == "quantize") return with<QuantizeArgs>(args, quantize_block);
    if (kernel == "merge") return with<ExpertArgs>(args, merge_block);
    if (kernel == "adam_fp32") return with<AdamArgs>(args, adam_fp32_block);
    if (kernel == "adam_bf16") return with<AdamArgs>(args, adam_bf16_block);
    if (kernel == "adam_8bit") return with<AdamArgs>(args, adam_8bit_block);
#define FORMAT_IS(F) \
    if (format == #F) return of_tokens<F>(kernel, tokens, args);
    FORMAT_IS(F32) FORMAT_IS(F16) FORMAT_IS(BF16) FORMAT_IS(Q4_0) FORMAT_IS(Q4_1) FORMAT_IS(Q5_0)
    FORMAT_IS(Q5_1) FORMAT_IS(Q8_0) FORMAT_IS(IQ4_NL) FORMAT_IS(MXFP4) FORMAT_IS(Q4_K)
    FORMAT_IS(Q5_K) FORMAT_IS(Q6_K)
#undef FORMAT_IS
    return {};
}

}  // namespace

void check_load(const void* at, u64 nbytes) {
    const u64 address = reinterpret_cast<u64>(at);
    if (address % nbytes) fail("a load is not aligned");
    for (const auto& [start, end] : regions)
        if (address >= start && address + nbytes <= end) return;
    fail("a load from memory that was not given");
}

u32 exchange(u32 mine, int mask) {
    Fiber& fiber = fibers[current];
    // Two buffers: a lane may be at its next shuffle before others have read this one's.
    std::vector<u32>& box = boxes[fiber.shuffles++ % 2];
    const int self = current;
    box[self] = mine;
    fiber.mask = mask;
    suspend(SHUFFLE);
    return box[self ^ mask];
}

void barrier() { suspend(WAITING); }

// Runs a grid; null, or what went wrong. `bounds`: `count` pairs of addresses that may be loaded
// from. `backwards`: warps and blocks in the opposite order, which must change nothing.
extern "C" const char* run(const char* kernel, const char* format, int tokens, int grid_x, int grid_y,
                           int threads, const void* args, const u64* bounds, int count,
                           int backwards) {
    failure.clear();
    regions.clear();
    for (int i = 0; i < count; ++i) regions.emplace_back(bounds[2 * i], bounds[2 * i + 1]);
    body = find(kernel, format, tokens, args);
    if (!body) return "there is no such kernel";
    if (threads % LANES) return "a block is whole warps";
    while (static_cast<int>(fibers.size()) < threads) fibers.emplace_back().stack.resize(STACK);
    for (auto& box : boxes) box.resize(fibers.size());
    blockDim = {static_cast<u32>(threads), 1, 1};
    for (int i = 0; i < grid_x * grid_y && failure.empty(); ++i) {
        const int at = backwards ? grid_x * grid_y - 1 - i : i;
        blockIdx = {static_cast<u32>(at % grid_x), static_cast<u32>(at / grid_x), 0};
        run_block(threads, backwards != 0);
    }
    return failure.empty() ? nullptr : failure.c_str();
}

extern "C" u64 size_of(const char* structure) {
    const std::map<std::string, u64> sizes = {{"Records", sizeof(Records)},
                                              {"QuantizeArgs", sizeof(QuantizeArgs)},
                                              {"LinearArgs", sizeof(LinearArgs)},
                                              {"ExpertArgs", sizeof(ExpertArgs)},
                                              {"DequantizeArgs", sizeof(DequantizeArgs)},
                                              {"AdamArgs", sizeof(AdamArgs)}};
    const auto found = sizes.find(structure);
    return found == sizes.end() ? 0 : found->second;
}
