// GilReleased: the GIL is given up while it lives. calling_python: a call that may run Python code, and so give it up.
//
// Where the interpreter ends meanwhile, taking the GIL back ends the thread by unwinding its stack (Python before 3.14).
// That must not go through C++ frames that were not made for it: the thread stops here and goes with its process.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace penstock {

inline void take_gil_back(PyThreadState *state) noexcept {
    try {
        PyEval_RestoreThread(state);
    } catch (...) {  // the forced unwinding of a thread that is to end: never left, so it is not swallowed either
        for (;;) pause();
    }
}

// Around what runs Python code where the stack must stay: inside a noexcept function, or while others hold pointers to it.
template <typename Function>
decltype(auto) calling_python(Function &&function) noexcept {
    try {
        return function();
    } catch (...) {  // as above: nothing else is thrown by Python's functions
        for (;;) pause();
    }
}

class GilReleased {
   public:
    GilReleased() noexcept : state_(PyEval_SaveThread()) {}
    ~GilReleased() { take_gil_back(state_); }
    GilReleased(const GilReleased &) = delete;
    GilReleased &operator=(const GilReleased &) = delete;

   private:
    PyThreadState *state_;
};

}  // namespace penstock
