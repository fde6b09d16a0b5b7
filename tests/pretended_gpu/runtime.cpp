// CUDA's runtime, driver and management library without a GPU, for torch's CUDA build.
//
// A device's memory is this process's. Copies are done when they are asked for, so streams have nothing to order and
// events only take the time. Kernels do not run: kernels.py puts the CPU's in their place, and one that torch launches
// all the same ends the process with its name, so that no result is ever made of memory that nobody wrote.
//
// One library serves as all: it is preloaded, which puts its functions before libcudart's, and torch finds it by the
// names libcuda.so.1 and libnvidia-ml.so.1. The driver's functions have plain types, since its header renames some of them by macros.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

struct Block {
  size_t size;
  int device;
  bool on_host;  // pinned
};

struct Event {
  double recorded_ms = 0;
};

// The tables are never destroyed: torch frees memory while the process ends.
std::mutex lock;
std::map<char*, Block>& blocks() { static auto* all = new std::map<char*, Block>; return *all; }
std::unordered_map<unsigned long long, Block>& physical() { static auto* all = new std::unordered_map<unsigned long long, Block>; return *all; }
std::unordered_map<const void*, std::string>& kernels() { static auto* all = new std::unordered_map<const void*, std::string>; return *all; }

thread_local int current_device = 0;
size_t used_bytes = 0;  // of all devices together
std::atomic<long> waits{0};  // calls for which the host would stand still
const size_t PAGE = 2 << 20;

int device_count() {
  static const int count = getenv("PRETENDED_GPUS") ? atoi(getenv("PRETENDED_GPUS")) : 1;
  return count;
}

size_t device_bytes() {
  static const double gib = getenv("PRETENDED_GPU_GIB") ? atof(getenv("PRETENDED_GPU_GIB")) : 79.1;
  return static_cast<size_t>(gib * (1ull << 30));
}

double now_ms() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

cudaError_t allocate(void** pointer, size_t size, bool on_host) {
  std::lock_guard<std::mutex> guard(lock);
  if (!on_host && used_bytes + size > device_bytes()) return cudaErrorMemoryAllocation;
  if (posix_memalign(pointer, on_host ? 4096 : PAGE, size ? size : 1)) return cudaErrorMemoryAllocation;
  blocks()[static_cast<char*>(*pointer)] = {size, current_device, on_host};
  if (!on_host) used_bytes += size;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks().find(static_cast<char*>(pointer));
  if (found == blocks().end()) return cudaErrorInvalidValue;
  if (!found->second.on_host) used_bytes -= found->second.size;
  blocks().erase(found);
  free(pointer);
  return cudaSuccess;
}

[[noreturn]] cudaError_t refuse_launch(const void* function) {
  auto found = kernels().find(function);
  fprintf(stderr, "pretended GPU: no CPU kernel stands in for %s\n", found == kernels().end() ? "a kernel without a name" : found->second.c_str());
  abort();
}

int not_supported() { return 801; }

}  // namespace

extern "C" {

#define ACCEPT(name, ...) cudaError_t name(__VA_ARGS__) { return cudaSuccess; }

// ---- devices: an H100, so that torch takes Hopper's paths ----

cudaError_t cudaGetDeviceCount(int* count) { *count = device_count(); return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int index) {
  memset(device, 0, sizeof *device);
  snprintf(device->name, sizeof device->name, "pretended NVIDIA H100");
  memset(&device->uuid, index + 1, sizeof device->uuid);
  device->pciBusID = index + 1;
  device->totalGlobalMem = device_bytes();
  device->major = 9;
  device->multiProcessorCount = 132;
  device->warpSize = 32;
  device->maxThreadsPerBlock = 1024;
  device->maxThreadsPerMultiProcessor = 2048;
  device->maxBlocksPerMultiProcessor = 32;
  device->sharedMemPerBlock = 48 << 10;
  device->sharedMemPerBlockOptin = 227 << 10;
  device->sharedMemPerMultiprocessor = 228 << 10;
  device->regsPerBlock = device->regsPerMultiprocessor = 65536;
  device->l2CacheSize = 50 << 20;
  device->totalConstMem = 65536;
  device->textureAlignment = 512;
  device->memoryBusWidth = 5120;
  device->asyncEngineCount = 3;
  device->concurrentKernels = device->unifiedAddressing = device->cooperativeLaunch = 1;
  device->maxGridSize[0] = 2147483647;
  device->maxGridSize[1] = device->maxGridSize[2] = 65535;
  device->maxThreadsDim[0] = device->maxThreadsDim[1] = 1024;
  device->maxThreadsDim[2] = 64;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) { snprintf(text, size, "0000:%02x:00.0", device + 1); return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> guard(lock);
  *total_bytes = device_bytes();
  *free_bytes = device_bytes() - used_bytes;
  return cudaSuccess;
}
ACCEPT(cudaDeviceEnablePeerAccess, int, unsigned)
cudaError_t cudaDeviceSynchronize() { ++waits; return cudaSuccess; }
long pretended_waits() { return waits; }
ACCEPT(cudaGetLastError)
ACCEPT(cudaPeekAtLastError)
ACCEPT(cudaProfilerStart)
ACCEPT(cudaProfilerStop)

// ---- memory ----

cudaError_t cudaMalloc(void** pointer, size_t size) { return allocate(pointer, size, false); }
cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return allocate(pointer, size, false); }
cudaError_t cudaFree(void* pointer) { return release(pointer); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer); }
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) { return allocate(pointer, size, true); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }
cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  std::lock_guard<std::mutex> guard(lock);
  blocks()[static_cast<char*>(pointer)] = {size, 0, true};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  blocks().erase(static_cast<char*>(pointer));
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* pointer) {
  memset(of, 0, sizeof *of);
  of->type = cudaMemoryTypeUnregistered;
  of->device = -1;
  std::lock_guard<std::mutex> guard(lock);
  auto* address = static_cast<char*>(const_cast<void*>(pointer));
  auto after = blocks().upper_bound(address);
  if (after == blocks().begin()) return cudaSuccess;
  const auto& [start, block] = *std::prev(after);
  if (address >= start + block.size) return cudaSuccess;
  of->type = block.on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  of->device = block.device;
  of->devicePointer = of->hostPointer = address;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) { memmove(to, from, size); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) { memmove(to, from, size); return cudaSuccess; }
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t) { memmove(to, from, size); return cudaSuccess; }
cudaError_t cudaMemset(void* to, int value, size_t size) { memset(to, value, size); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) { memset(to, value, size); return cudaSuccess; }

// ---- streams and events: torch compares and keeps the handles, and never looks into them ----

cudaError_t cudaStreamCreate(cudaStream_t* stream) { *stream = static_cast<cudaStream_t>(malloc(1)); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
#if CUDART_VERSION < 13000
#define EDGES
#else
#define EDGES const cudaGraphEdgeData**,
#endif
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**, EDGES size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
ACCEPT(cudaStreamDestroy, cudaStream_t)
cudaError_t cudaStreamSynchronize(cudaStream_t) { ++waits; return cudaSuccess; }
ACCEPT(cudaStreamQuery, cudaStream_t)
ACCEPT(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
ACCEPT(cudaThreadExchangeStreamCaptureMode, cudaStreamCaptureMode*)

cudaError_t cudaEventCreate(cudaEvent_t* event) { *event = reinterpret_cast<cudaEvent_t>(new Event); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { delete reinterpret_cast<Event*>(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { reinterpret_cast<Event*>(event)->recorded_ms = now_ms(); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t last) {
  *ms = reinterpret_cast<Event*>(last)->recorded_ms - reinterpret_cast<Event*>(first)->recorded_ms;
  return cudaSuccess;
}
ACCEPT(cudaEventQuery, cudaEvent_t)
cudaError_t cudaEventSynchronize(cudaEvent_t) { ++waits; return cudaSuccess; }

// ---- kernels: noted by name when a library registers them, refused when one is launched ----

void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> guard(lock);
  kernels()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 0; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
ACCEPT(__cudaPopCallConfiguration, dim3*, dim3*, size_t*, void*)
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)); return cudaSuccess; }
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { refuse_launch(function); }
cudaError_t __cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { refuse_launch(function); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) { refuse_launch(function); }
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { refuse_launch(function); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
  memset(of, 0, sizeof *of);
  of->maxThreadsPerBlock = 1024;
  of->binaryVersion = of->ptxVersion = 90;
  return cudaSuccess;
}
ACCEPT(cudaFuncSetAttribute, const void*, cudaFuncAttribute, int)
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) { *count = 2; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) { *count = 2; return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) { *pointer = const_cast<void*>(symbol); return cudaSuccess; }
ACCEPT(cudaMemcpyToSymbol, const void*, const void*, size_t, size_t, cudaMemcpyKind)

// ---- driver ----

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { *version = CUDART_VERSION; return 0; }
int cuDeviceGetCount(int* count) { *count = device_count(); return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { return cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device); }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { static int one; *context = &one; return 0; }
int cuCtxGetCurrent(void** context) { return cuDevicePrimaryCtxRetain(context, 0); }
int cuCtxSetCurrent(void*) { return 0; }
int cuGetErrorString(int, const char** text) { *text = "an error of the pretended GPU"; return 0; }
int cuPointerGetAttribute(void*, int, unsigned long long) { return 1; }

// Segments that grow: addresses are reserved once, and memory comes and goes behind them.

struct AllocationProperties { int type, handle_types, location_type, device; };  // as cuda.h's CUmemAllocationProp begins

int cuMemAddressReserve(unsigned long long* address, size_t size, size_t, unsigned long long, unsigned long long) {
  void* reserved = mmap(nullptr, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return 2;
  *address = (reinterpret_cast<unsigned long long>(reserved) + PAGE - 1) / PAGE * PAGE;
  return 0;
}
int cuMemAddressFree(unsigned long long address, size_t size) { return munmap(reinterpret_cast<void*>(address), size) ? 1 : 0; }
int cuMemGetAllocationGranularity(size_t* granularity, const void*, int) { *granularity = PAGE; return 0; }
int cuMemCreate(unsigned long long* handle, size_t size, const AllocationProperties* properties, unsigned long long) {
  static unsigned long long last = 0;
  std::lock_guard<std::mutex> guard(lock);
  if (used_bytes + size > device_bytes()) return 2;  // out of memory
  used_bytes += size;
  physical()[*handle = ++last] = {size, properties->device, false};
  return 0;
}
int cuMemMap(unsigned long long address, size_t size, size_t, unsigned long long handle, unsigned long long) {
  std::lock_guard<std::mutex> guard(lock);
  auto* start = reinterpret_cast<char*>(address);
  blocks()[start] = {size, physical().at(handle).device, false};
  return mprotect(start, size, PROT_READ | PROT_WRITE) ? 1 : 0;
}
int cuMemSetAccess(unsigned long long, size_t, const void*, size_t) { return 0; }
int cuMemUnmap(unsigned long long address, size_t size) {
  std::lock_guard<std::mutex> guard(lock);
  auto* start = reinterpret_cast<char*>(address);
  blocks().erase(blocks().lower_bound(start), blocks().lower_bound(start + size));
  madvise(start, size, MADV_DONTNEED);
  return mprotect(start, size, PROT_NONE) ? 1 : 0;
}
int cuMemRelease(unsigned long long handle) {
  std::lock_guard<std::mutex> guard(lock);
  used_bytes -= physical().at(handle).size;
  physical().erase(handle);
  return 0;
}

#define NOT_SUPPORTED(name) int name() { return not_supported(); }
NOT_SUPPORTED(cuFuncGetAttribute)
NOT_SUPPORTED(cuFuncSetAttribute)
NOT_SUPPORTED(cuFuncSetCacheConfig)
NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuLaunchKernel)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuModuleGetFunction)
NOT_SUPPORTED(cuModuleLoad)
NOT_SUPPORTED(cuModuleLoadData)
NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload)
NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_SUPPORTED(cuTensorMapEncodeTiled)

// ---- NVML, which says whether GPUs of several nodes share memory: they do not ----

int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { static int one; *device = &one; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // leaves what the caller wrote: in no fabric
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { *count = 0; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = CUDART_VERSION; return 0; }

// torch asks the runtime for a few of the driver's functions by name.
static cudaError_t entry_point(const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
  void* found = dlsym(RTLD_DEFAULT, name);
  *function = found ? found : reinterpret_cast<void*>(not_supported);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, cudaDriverEntryPointQueryResult* result) { return entry_point(name, function, result); }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) { return entry_point(name, function, result); }

}  // extern "C"
