// Atomics. Threads are fibers of one processor thread, so plain operations are atomic.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

#ifdef MSL_LINT
#define MSL_TOUCH(p, loads, stores)
#else
#define MSL_TOUCH(p, loads, stores) msl_atomic(p, sizeof(p->value), loads, stores, at)
#endif

// P is a pointer to an atomic in any address space.
template <class P>
MSL_HIDDEN auto atomic_load_explicit(P p, memory_order, MSL_AT) -> decltype(p->value) {
  MSL_TOUCH(p, true, false);
  return p->value;
}
template <class P, class U>
MSL_HIDDEN void atomic_store_explicit(P p, U x, memory_order, MSL_AT) {
  MSL_TOUCH(p, false, true);
  p->value = (decltype(p->value))x;
}

#define MSL_FETCH(name, expression)                                                       \
  template <class P, class U>                                                             \
  MSL_HIDDEN auto atomic_##name##_explicit(P p, U x, memory_order, MSL_AT)                \
      -> decltype(p->value) {                                                             \
    MSL_TOUCH(p, true, true);                                                             \
    decltype(p->value) a = p->value, b = (decltype(p->value))x;                           \
    p->value = (decltype(p->value))(expression);                                          \
    return a;                                                                             \
  }
MSL_FETCH(exchange, b)
MSL_FETCH(fetch_add, a + b)
MSL_FETCH(fetch_sub, a - b)
MSL_FETCH(fetch_max, a < b ? b : a)
MSL_FETCH(fetch_min, b < a ? b : a)
MSL_FETCH(fetch_or, a | b)
MSL_FETCH(fetch_and, a & b)
MSL_FETCH(fetch_xor, a ^ b)
#undef MSL_FETCH

template <class P, class T, class U>
MSL_HIDDEN bool atomic_compare_exchange_weak_explicit(
    P p, T* expected, U desired, memory_order, memory_order, MSL_AT) {
  MSL_TOUCH(p, true, true);
  bool same = p->value == *expected;
  if (same) {
    p->value = (T)desired;
  } else {
    *expected = p->value;
  }
  return same;
}
#undef MSL_TOUCH

// Logging is kept quiet.
struct os_log {
  constexpr os_log(const char*, const char*) {}
  template <class... A>
  void log_debug(const char*, A...) const {}
  template <class... A>
  void log_info(const char*, A...) const {}
};

} // namespace metal
