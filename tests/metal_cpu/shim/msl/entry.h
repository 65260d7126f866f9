// Calls a kernel with what its parameters are bound to. Comes after the kernel's text.
#undef device
#undef constant
#undef threadgroup
#undef thread
#undef kernel

namespace msl {

struct Binding {
  int builtin; // an index of BUILTINS in signature.py; 0: a buffer
  int index; // of the buffer
};

template <class P>
MSL_INLINE P bound(Binding binding, void* const* buffers) {
  if constexpr (std::is_pointer_v<P>) {
    return (P)buffers[binding.index];
  } else if constexpr (std::is_reference_v<P>) {
    return *(std::remove_reference_t<P>*)buffers[binding.index];
  } else {
    const unsigned* value = msl_builtin(binding.builtin);
    if constexpr (Parts<P>::count == 0) {
      return (P)value[0];
    } else {
      P result;
      for (int i = 0; i < Parts<P>::count; i++) {
        result[i] = value[i];
      }
      return result;
    }
  }
}

template <class... P, size_t... I>
MSL_INLINE void call(
    void (*function)(P...), const Binding* bindings, void* const* buffers,
    std::index_sequence<I...>) {
  function(bound<P>(bindings[I], buffers)...);
}

template <class... P>
MSL_INLINE void call(void (*function)(P...), const Binding* bindings, void* const* buffers) {
  call(function, bindings, buffers, std::make_index_sequence<sizeof...(P)>());
}

} // namespace msl

#define MSL_ENTRY(bindings, ...)                                                  \
  extern "C" __attribute__((no_sanitize("address", "undefined"))) void msl_entry( \
      void* const* buffers) {                                                     \
    static const ::msl::Binding all[] = bindings;                                 \
    ::msl::call(__VA_ARGS__, all, buffers);                                       \
  }
