// Common parts of our kernels on Hopper: barriers, the bulk copy engine, descriptors for the matrix
// instructions, and rounding to 16 bits. The host side puts it before a kernel's file, and defines
// BFLOAT16.

struct alignas(64) TensorMap {
  unsigned long long words[16];
};

__device__ unsigned shared_address(const void* pointer) {
  unsigned long long address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return unsigned(address);
}

__device__ void make_barrier(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes new barriers visible to other threads. The thread that initialised them calls it.
__device__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ void expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies 64 inputs from `input` on of the rows from `row` on; elements outside of the tensor are 0.
__device__ void copy(unsigned to, const TensorMap& map, int input, int row, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(input), "r"(row), "r"(barrier)
      : "memory");
}

// The descriptor with which wgmma finds a matrix of swizzled rows of 128 bytes; 8 rows are 1,024 bytes.
__device__ unsigned long long matrix(unsigned address) {
  return (1ull << 62) | (64ull << 32) | (1ull << 16) | (address >> 4);
}

// Orders writes of registers that hold sums before matrix instructions that add to them.
__device__ void multiply_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a batch of matrix instructions, which begin to run.
__device__ void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all matrix instructions of this warpgroup have ended.
__device__ void multiply_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

__device__ void multiply_end() {
  multiply_commit();
  multiply_wait();
}

// Keeps the compiler from moving reads of the sums before `multiply_end`.
template <int COUNT>
__device__ void settle(float (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Copies 16 bytes to shared memory by cp.async; where `there` is false, zeros.
__device__ void copy_16(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups of this thread's copies have not ended.
template <int PENDING>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Orders this thread's accesses to shared memory, and copies that it has waited for, before those of
// matrix instructions.
__device__ void show_to_multiply() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ uint4 load_16(unsigned from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ void store_16(unsigned to, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

// Waits until the kernel before has ended and its writes are visible (programmatic dependent launch).
__device__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel begin. It waits for this one's end in `wait_for_kernel_before`.
__device__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

// Two numbers, rounded, in a word.
__device__ unsigned round(float low, float high) {
  unsigned word;
#if BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
  return word;
}

__device__ float number(unsigned short bits) {
#if BFLOAT16
  return __uint_as_float(unsigned(bits) << 16);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}

__device__ float low(unsigned word) { return number((unsigned short)(word)); }
__device__ float high(unsigned word) { return number((unsigned short)(word >> 16)); }

__device__ float silu(float x) {
  float power, result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("div.approx.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(1 + power));
  return result;
}

// The tanh form of GELU: x * sigmoid(2 z).
__device__ float gelu(float x) {
  const float z = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  float power, result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(z * -2.8853900817779268f));
  asm("div.approx.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(1 + power));
  return result;
}

// silu(gate) * up, or gelu(gate) * up, of two numbers; each step is rounded, as if it were a tensor.
template <bool TANH = false>
__device__ unsigned gated(float gate, float next_gate, float up, float next_up) {
  const unsigned gates = round(gate, next_gate), ups = round(up, next_up);
  const float first = low(gates), second = high(gates);
  const unsigned active =
      TANH ? round(gelu(first), gelu(second)) : round(silu(first), silu(second));
  return round(low(active) * low(ups), high(active) * high(ups));
}
