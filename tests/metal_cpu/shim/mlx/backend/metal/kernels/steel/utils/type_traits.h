// MLX's own tells pointers apart by address space; here the library removes it.
#pragma once
namespace metal {

template <typename... Ts>
struct make_void {
  typedef void type;
};
template <typename... Ts>
using void_t = typename make_void<Ts...>::type;

template <class T>
struct is_static : bool_constant<is_empty_v<remove_cv_t<T>>> {};

template <typename T>
struct pointer_element {};
template <typename T>
struct pointer_element<T*> {
  typedef remove_cv_t<remove_addrspace_t<T>> type;
};
template <typename T>
using pointer_element_t = typename pointer_element<remove_cv_t<T>>::type;

} // namespace metal
