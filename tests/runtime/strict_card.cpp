// A device of torch's that is the CPU in disguise, and strict about it: its tensors have storages of
// their own device, every operator on them runs the CPU's kernel on the same bytes, and operands of
// two devices in one operator are an error, as on a card. It has a generator of its own, and the
// autograd engine gives it a thread of its own.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

using at::Tensor;
constexpr auto CARD = c10::DeviceType::PrivateUse1;
const c10::Device HERE(CARD, 0);

// -- memory ------------------------------------------------------------------------------------

void free_bytes(void* bytes) { std::free(bytes); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* bytes = n ? std::aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    if (bytes) std::memset(bytes, 0xA5, n);  // fresh memory of a card holds anything
    return {bytes, bytes, &free_bytes, HERE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_bytes; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
Allocator allocator;
REGISTER_ALLOCATOR(CARD, &allocator);

// -- the guard: one stream, whose work is done when it is queued ---------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CARD; }
  c10::Device exchangeDevice(c10::Device) const override { return HERE; }
  c10::Device getDevice() const override { return HERE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override { *event = nullptr; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, HERE); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- random numbers --------------------------------------------------------------------------------

struct CardGenerator final : at::CPUGeneratorImpl {
  explicit CardGenerator(uint64_t seed) : at::CPUGeneratorImpl(seed) {
    device_ = HERE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& generator() {  // a CPU's in name: what the CPU's kernels take
  static at::Generator ours = at::make_generator<at::CPUGeneratorImpl>(0xCA4D);
  return ours;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator named = at::make_generator<CardGenerator>(0xCA4D);
    return named;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<CardGenerator>(c10::default_rng_seed_val);
  }
  c10::Device getDeviceFromPtr(void*) const override { return HERE; }
  bool isPinnedPtr(const void*) const override { return false; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), n);
  }
};

// -- the disguise --------------------------------------------------------------------------------

bool ours(const Tensor& t) { return t.defined() && t.device().type() == CARD; }

Tensor as_cpu(const Tensor& t) {
  return at::for_blob(t.unsafeGetTensorImpl()->storage().mutable_data() == nullptr
                          ? nullptr
                          : static_cast<char*>(t.storage().mutable_data()) +
                                t.storage_offset() * t.itemsize(),
                      t.sizes())
      .strides(t.strides())
      .options(t.options().device(at::kCPU).requires_grad(false))
      .make_tensor();
}

Tensor as_card(const Tensor& cpu) {
  if (!cpu.defined() || cpu.device().type() != at::kCPU) return cpu;
  auto* keep = new Tensor(cpu);
  c10::DataPtr bytes(cpu.storage().mutable_data(), keep,
                     [](void* kept) { delete static_cast<Tensor*>(kept); }, HERE);
  c10::Storage storage(c10::Storage::use_byte_size_t(), cpu.storage().nbytes(), std::move(bytes),
                       &allocator, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), cpu.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(),
                                                    cpu.storage_offset());
  return made;
}

bool takes_both(const std::string& name) {  // as CUDA's: indices may be the CPU's
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 ||
         name.rfind("aten::_unsafe_index", 0) == 0;
}

struct Pair {
  Tensor card, cpu;
  bool fresh;
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  std::vector<Pair> pairs;
  bool mine = false;
  const Tensor* foreign = nullptr;
  std::vector<Tensor> all;
  all.reserve(64);
  auto turn = [&](const Tensor& t, bool written) -> Tensor {
    if (!t.defined()) return t;
    if (!ours(t)) {
      all.push_back(t);
      if (t.dim() > 0) foreign = &all.back();
      TORCH_CHECK(!written, name, ": a tensor of ", t.device(), " is written with one of the card");
      return t;
    }
    mine = true;
    const bool fresh = written && t.numel() == 0;
    Tensor cpu = fresh ? at::empty(t.sizes(), t.options().device(at::kCPU)) : as_cpu(t);
    pairs.push_back({t, cpu, fresh});
    return cpu;
  };
  for (size_t i = 0; i < n; ++i) {
    auto& value = (*stack)[first + i];
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = turn(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorList()) list.push_back(turn(t, written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : value.toOptionalTensorList())
        list.push_back(t ? std::optional<Tensor>(turn(*t, written)) : t);
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (argument.real_type()->isSubtypeOf(
                   *c10::OptionalType::create(c10::GeneratorType::get()))) {
      if (value.isNone() || value.toGenerator().device().type() == CARD) value = generator();
    }
  }
  TORCH_CHECK(!mine || !foreign || takes_both(name),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              HERE, " and ", foreign ? foreign->device() : HERE, "! (in ", name, ")");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto back = [&](const Tensor& t, const c10::AliasInfo* alias) -> Tensor {
    if (!t.defined()) return t;
    for (auto& p : pairs)
      if (p.cpu.is_same(t)) {
        if (p.fresh && t.numel() > 0) {
          p.card.resize_(t.sizes());
          as_cpu(p.card).copy_(t);
        }
        return p.card;
      }
    if (alias)
      for (auto& p : pairs) {
        if (t.storage().data() != p.cpu.storage().data()) continue;
        auto start = static_cast<const char*>(t.const_data_ptr()) -
                     static_cast<const char*>(p.card.storage().data());
        return at::native::as_strided_tensorimpl(p.card, t.sizes(), t.strides(),
                                                 start / t.itemsize());
      }
    return as_card(t);
  };
  const auto& returns = schema.returns();
  const size_t at = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[at + i];
    if (value.isTensor()) {
      value = back(value.toTensor(), returns[i].alias_info());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorList()) list.push_back(back(t, returns[i].alias_info()));
      value = list;
    }
  }
  for (auto& p : pairs)  // written, and not returned
    if (p.fresh && p.cpu.numel() > 0 && p.card.numel() == 0) {
      p.card.resize_(p.cpu.sizes());
      as_cpu(p.card).copy_(p.cpu);
    }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  Tensor from = ours(self) ? as_cpu(self) : self;
  Tensor into = ours(to) ? as_cpu(to) : to;
  into.copy_(from);
  return to;
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size,
                     std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size),
                               std::nullopt);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, c10::SymInt offset,
                    c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset.expect_int(),
                                      C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

// The CPU's kernel would draw from the CPU's generator.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor mask = at::empty_like(input).bernoulli_(1 - p);
  return {input * mask * (1 / (1 - p)), mask.to(at::kBool)};
}

// The CPU's attention, for the CPU's bits. Its operator runs in disguise like all others.
int64_t attention(const Tensor& q, const Tensor& k, const Tensor& v,
                  const std::optional<Tensor>& mask, double dropout, bool causal,
                  std::optional<double> scale, bool grouped) {
  auto hidden = mask ? std::optional<Tensor>(as_cpu(*mask)) : std::nullopt;
  return at::native::_fused_sdp_choice_cpp(as_cpu(q), as_cpu(k), as_cpu(v), hidden, dropout, causal,
                                           scale, grouped);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("native_dropout", &dropout);
  // The CPU has kernels where others put operators together from several, with other bits.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.getNamespace() != "aten" || !op || !op->hasSchema()) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the part of CUDA's lists that layers meet
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
}

TORCH_LIBRARY(paper_card, m) {
  m.def("seed(int seed) -> ()", [](int64_t seed) { generator().set_current_seed(seed); });
  m.def("state() -> Tensor", []() { return generator().get_state(); });
  m.def("set_state(Tensor state) -> ()", [](const Tensor& s) { generator().set_state(s); });
}

struct Register {
  Register() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} registered;

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention)
}  // namespace at::native
