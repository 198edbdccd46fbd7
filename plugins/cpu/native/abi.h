// torch's stable C interface, as far as this library uses it, since torch 2.10: declared here, so that the library is
// built without torch, for any platform, and one build serves every release from 2.10 on. The names, types and rules of
// ownership are those of torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h.
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

extern "C" {
struct AtenTensorOpaque;
struct TorchLibraryOpaque;
using StableIValue = uint64_t;  // a number, a tensor's handle, or for an optional value null or a pointer to one
using BoxedKernel = void (*)(StableIValue* stack, uint64_t arguments, uint64_t results);

int32_t aoti_torch_library_init_fragment(const char* ns, const char* file, uint32_t line, TorchLibraryOpaque** library);
int32_t aoti_torch_library_init_impl(const char* ns, const char* key, const char* file, uint32_t line,
                                     TorchLibraryOpaque** library);
int32_t aoti_torch_library_def(TorchLibraryOpaque* library, const char* schema);
int32_t torch_library_impl(TorchLibraryOpaque* library, const char* name, BoxedKernel kernel, uint64_t version);
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*task)(int64_t, int64_t, void*), void*);
int32_t torch_get_num_threads(uint32_t* threads);

int32_t aoti_torch_delete_tensor_object(AtenTensorOpaque* tensor);
int32_t aoti_torch_get_data_ptr(AtenTensorOpaque* tensor, void** data);
int32_t aoti_torch_get_numel(AtenTensorOpaque* tensor, int64_t* numel);
int32_t aoti_torch_get_dim(AtenTensorOpaque* tensor, int64_t* dim);
int32_t aoti_torch_get_sizes(AtenTensorOpaque* tensor, int64_t** sizes);
int32_t aoti_torch_get_dtype(AtenTensorOpaque* tensor, int32_t* dtype);
int32_t aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index, AtenTensorOpaque** tensor);
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int64();
}

namespace qcore_cpu {

constexpr uint64_t TORCH_VERSION = 2ull << 56 | 10ull << 48;  // whose conventions the boxed kernels follow

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error("qcore_cpu: " + message); }

// Every function returns 0 unless it failed.
inline void ok(int32_t code) {
  if (code) fail("torch's C interface reported an error");
}

// A tensor that this process shares with torch: owned, and given back when it goes.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorOpaque* owned) : handle_(owned) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }
  explicit operator bool() const { return handle_; }
  AtenTensorOpaque* release() { return std::exchange(handle_, nullptr); }
  template <class T = void>
  T* data() const {  // null if there is no tensor
    void* p = nullptr;
    if (handle_) ok(aoti_torch_get_data_ptr(handle_, &p));
    return static_cast<T*>(p);
  }
  int64_t numel() const {
    int64_t n;
    ok(aoti_torch_get_numel(handle_, &n));
    return n;
  }
  int64_t dim() const {
    int64_t n;
    ok(aoti_torch_get_dim(handle_, &n));
    return n;
  }
  const int64_t* sizes() const {
    int64_t* sizes;
    ok(aoti_torch_get_sizes(handle_, &sizes));
    return sizes;
  }
  int64_t size(int i) const { return sizes()[i]; }
  int32_t dtype() const {
    int32_t d;
    ok(aoti_torch_get_dtype(handle_, &d));
    return d;
  }

 private:
  AtenTensorOpaque* handle_ = nullptr;
};

// Takes the arguments of a boxed kernel from the stack, in order. All of them have to be taken: they are owned.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}
  Tensor tensor() { return Tensor(reinterpret_cast<AtenTensorOpaque*>(*next_++)); }
  Tensor maybe_tensor() {
    auto* value = reinterpret_cast<StableIValue*>(*next_++);
    if (!value) return Tensor();
    Tensor tensor(reinterpret_cast<AtenTensorOpaque*>(*value));
    delete value;
    return tensor;
  }
  int64_t integer() { return read<int64_t>(); }
  double number() { return read<double>(); }
  bool boolean() { return read<bool>(); }

 private:
  template <class T>
  T read() {
    T value;
    std::memcpy(&value, next_++, sizeof value);  // in the low bytes: all platforms here are little-endian
    return value;
  }
  StableIValue* next_;
};

}  // namespace qcore_cpu
