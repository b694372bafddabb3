// The extension module; its functions are in _kernels.pyi. Addresses are integers; the interpreter's lock is released.
// Sizes and the contents of structs and block tables are checked before an address is followed (ValueError). The Python
// caller, which has the tensors, ensures that each address has as much memory as the sizes say.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>
#include <new>
#include <stdexcept>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "batch_from_python.h"
#include "sample.h"
#include "elementwise.h"

#ifndef NAME
#define NAME "_kernels"
#define INIT PyInit__kernels
#endif

namespace {

using namespace decant;

template <class P>
P* pointer(unsigned long long address) { return reinterpret_cast<P*>(static_cast<uintptr_t>(address)); }

// Sets Python's error for a C++ exception.
void raise(const std::exception_ptr& caught) {
    try {
        std::rethrow_exception(caught);
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::logic_error& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

// Runs `f` without the interpreter's lock. Returns whether it succeeded; if not, Python's error is set.
template <class F>
bool run(const F& f) {
    std::exception_ptr caught;
    Py_BEGIN_ALLOW_THREADS
    try {
        f();
    } catch (...) {
        caught = std::current_exception();
    }
    Py_END_ALLOW_THREADS
    if (caught) raise(caught);
    return !caught;
}

// As `run`, for Python functions that return None.
template <class F>
PyObject* none(const F& f) {
    if (!run(f)) return nullptr;
    Py_RETURN_NONE;
}

void check_rows(int64_t rows, const char* field, int64_t width, int threads) {
    check_count("rows", rows);
    check_positive(field, width);
    check_threads(threads);
}

template <class... P>
void check_addresses(const char* field, P... addresses) {
    for (unsigned long long address : {addresses...}) require(address, field, "addresses", 0);
}

PyObject* py_pack(PyObject*, PyObject* args) {
    int half;
    unsigned long long weight, packed;
    long outputs, inner, bytes = 0;
    if (!PyArg_ParseTuple(args, "pKKll", &half, &weight, &packed, &outputs, &inner)) return nullptr;
    void* to = pointer<void>(packed);
    bool done = run([&] {
        check_pack(pointer<void>(weight), outputs, inner, to);
        if (half) bytes = Weight<BFloat16>::pack(pointer<const uint16_t>(weight), outputs, inner, to);
        else bytes = Weight<Float32>::pack(pointer<const float>(weight), outputs, inner, to);
    });
    return done ? PyLong_FromLong(bytes) : nullptr;
}

PyObject* py_pack_codes(PyObject*, PyObject* args) {
    int half, for_int8, half_scales;
    unsigned long long codes, scales, zeros, mins, packed;
    long kind, outputs, inner, group, bytes = 0;
    if (!PyArg_ParseTuple(args, "pplKKKKpKlll", &half, &for_int8, &kind, &codes, &scales, &zeros, &mins, &half_scales, &packed,
                          &outputs, &inner, &group))
        return nullptr;
    void* to = pointer<void>(packed);
    bool done = run([&] {
        CodesHeader header{int32_t(std::clamp(kind, 0L, 99L)), zeros != 0, half_scales, mins != 0, outputs, inner, group};
        Codes from{pointer<uint8_t>(codes), pointer<float>(scales), pointer<uint8_t>(zeros), pointer<float>(mins)};
        check(header, outputs, inner);
        check(from, header);
        if (to) check_packed("packed", to);
        if (for_int8) check_int8(header), bytes = pack_codes<Int8>(from, header, to);
        else bytes = half ? pack_codes<BFloat16>(from, header, to) : pack_codes<Float32>(from, header, to);
    });
    return done ? PyLong_FromLong(bytes) : nullptr;
}

template <class T>
void multiply_checked(const Product<T>& product, int threads) {
    product.check();
    check_threads(threads);
    product.run(threads);
}

PyObject* py_multiply(PyObject*, PyObject* args) {
    int half, threads;
    unsigned long long x, weight, bias, out;
    long form, rows, inner, panels;
    if (!PyArg_ParseTuple(args, "plKKKKllli", &half, &form, &x, &weight, &bias, &out, &rows, &inner, &panels, &threads))
        return nullptr;
    return none([&] {
        if (half)
            multiply_checked(Product<BFloat16>{pointer<const uint16_t>(x), LayerWeight<BFloat16>(pointer<void>(weight), form),
                                               pointer<const float>(bias), pointer<uint16_t>(out), rows, inner, panels},
                             threads);
        else
            multiply_checked(Product<Float32>{pointer<const float>(x), LayerWeight<Float32>(pointer<void>(weight), form),
                                              pointer<const float>(bias), pointer<float>(out), rows, inner, panels},
                             threads);
    });
}

PyObject* py_attend(PyObject*, PyObject* args) {
    int half_cache, half_query, threads;
    unsigned long long cache, step, call;
    if (!PyArg_ParseTuple(args, "ppKKKi", &half_cache, &half_query, &cache, &step, &call, &threads)) return nullptr;
    return none([&] {
        check_addresses("cache, step and call", cache, step, call);
        check_threads(threads);
        const Cache& c = *pointer<const Cache>(cache);
        const Step& s = *pointer<const Step>(step);
        const Call& one = *pointer<const Call>(call);
        check(c);
        check(s, one.tokens, c.block_size, c.blocks);
        check(one, c, s);
        if (half_cache) attend<BFloat16>(c, s, s, one, half_query, threads);
        else attend<Float32>(c, s, s, one, half_query, threads);
    });
}

PyObject* py_layers(PyObject*, PyObject* args) {
    int half, threads;
    unsigned long long calls, x, cos, sin, out, changes;
    long count, tokens;
    if (!PyArg_ParseTuple(args, "pKlKKKKlKi", &half, &calls, &count, &x, &cos, &sin, &out, &tokens, &changes, &threads))
        return nullptr;
    return none([&] {
        check_addresses("calls, x, cos, sin and out", calls, x, cos, sin, out);
        check_threads(threads);
        const LayerCall* first = pointer<const LayerCall>(calls);
        const StepChanges* step_changes = pointer<const StepChanges>(changes);
        check(first, count, tokens, step_changes);
        if (half)
            run_layers<BFloat16>(first, count, pointer<const uint16_t>(x), pointer<const uint16_t>(cos),
                                 pointer<const uint16_t>(sin), pointer<uint16_t>(out), tokens, step_changes, threads);
        else
            run_layers<Float32>(first, count, pointer<const float>(x), pointer<const float>(cos),
                                pointer<const float>(sin), pointer<float>(out), tokens, step_changes, threads);
    });
}

PyObject* py_rms_norm(PyObject*, PyObject* args) {
    int half, threads;
    unsigned long long x, weight, out;
    long rows, width;
    float eps;
    if (!PyArg_ParseTuple(args, "pKKKllfi", &half, &x, &weight, &out, &rows, &width, &eps, &threads)) return nullptr;
    return none([&] {
        check_rows(rows, "width", width, threads);
        if (rows) check_addresses("x, weight and out", x, weight, out);
        if (half)
            rms_norm(pointer<const uint16_t>(x), pointer<const uint16_t>(weight), pointer<uint16_t>(out), rows, width,
                     eps, threads);
        else
            rms_norm(pointer<const float>(x), pointer<const float>(weight), pointer<float>(out), rows, width, eps,
                     threads);
    });
}

PyObject* py_gate(PyObject*, PyObject* args) {
    int half, threads;
    unsigned long long open, up, out;
    long rows, width, stride;
    if (!PyArg_ParseTuple(args, "pKKKllli", &half, &open, &up, &out, &rows, &width, &stride, &threads)) return nullptr;
    return none([&] {
        check_rows(rows, "width", width, threads);
        check_count("stride", stride);
        if (rows) check_addresses("gate, up and out", open, up, out);
        if (half)
            gate(pointer<const uint16_t>(open), pointer<const uint16_t>(up), pointer<uint16_t>(out), rows, width,
                 stride, threads);
        else
            gate(pointer<const float>(open), pointer<const float>(up), pointer<float>(out), rows, width, stride,
                 threads);
    });
}

PyObject* py_rotate(PyObject*, PyObject* args) {
    int half, threads;
    unsigned long long x, cos, sin, out;
    long tokens, heads, width, token, head;
    if (!PyArg_ParseTuple(args, "pKKKKllllli", &half, &x, &cos, &sin, &out, &tokens, &heads, &width, &token, &head,
                          &threads))
        return nullptr;
    return none([&] {
        check_rows(tokens, "width", width, threads);
        require(width % 2 == 0, "width", "an even number", width);
        check_positive("heads", heads);
        check_count("token_stride", token);
        check_count("head_stride", head);
        if (tokens) check_addresses("x, cos, sin and out", x, cos, sin, out);
        if (half)
            rotate(pointer<const uint16_t>(x), pointer<const uint16_t>(cos), pointer<const uint16_t>(sin),
                   pointer<uint16_t>(out), tokens, heads, width, token, head, threads);
        else
            rotate(pointer<const float>(x), pointer<const float>(cos), pointer<const float>(sin), pointer<float>(out),
                   tokens, heads, width, token, head, threads);
    });
}

PyObject* py_highest(PyObject*, PyObject* args) {
    int half, threads;
    unsigned long long rows, scores, indices;
    long count, vocabulary, stride;
    if (!PyArg_ParseTuple(args, "pKKKllli", &half, &rows, &scores, &indices, &count, &vocabulary, &stride, &threads))
        return nullptr;
    bool finite = false;
    bool done = run([&] {
        check_rows(count, "vocabulary", vocabulary, threads);
        check_count("stride", stride);
        if (count) check_addresses("rows, scores and indices", rows, scores, indices);
        float* top_scores = pointer<float>(scores);
        int64_t* top_indices = pointer<int64_t>(indices);
        if (half) finite = highest(pointer<const uint16_t>(rows), top_scores, top_indices, count, vocabulary, stride, threads);
        else finite = highest(pointer<const float>(rows), top_scores, top_indices, count, vocabulary, stride, threads);
    });
    return done ? PyBool_FromLong(finite) : nullptr;
}

PyObject* py_draw(PyObject*, PyObject* args) {
    unsigned long long rows, tokens;
    long count, vocabulary;
    int threads;
    if (!PyArg_ParseTuple(args, "KKlli", &rows, &tokens, &count, &vocabulary, &threads)) return nullptr;
    return none([&] {
        check_rows(count, "vocabulary", vocabulary, threads);
        if (count) check_addresses("rows and tokens", rows, tokens);
        draw(pointer<const DrawRequest>(rows), pointer<int64_t>(tokens), count, vocabulary, threads);
    });
}

PyObject* py_flatten(PyObject*, PyObject* args) {
    PyObject* argument;
    long block_size;
    int blank;
    if (!PyArg_ParseTuple(args, "Oli", &argument, &block_size, &blank)) return nullptr;
    PyObject* rows = PySequence_Fast(argument, "rows are a sequence");
    if (!rows) return nullptr;
    PyObject* result = nullptr;
    try {
        Flattening flattening;
        if (flattening.read(rows, block_size)) result = flattening.to_python(blank);
    } catch (...) {
        raise(std::current_exception());
    }
    Py_DECREF(rows);
    return result;
}

PyMethodDef METHODS[] = {
    {"flatten", py_flatten, METH_VARARGS, nullptr},
    {"pack", py_pack, METH_VARARGS, nullptr},
    {"pack_codes", py_pack_codes, METH_VARARGS, nullptr},
    {"multiply", py_multiply, METH_VARARGS, nullptr},
    {"attend", py_attend, METH_VARARGS, nullptr},
    {"layers", py_layers, METH_VARARGS, nullptr},
    {"rms_norm", py_rms_norm, METH_VARARGS, nullptr},
    {"gate", py_gate, METH_VARARGS, nullptr},
    {"rotate", py_rotate, METH_VARARGS, nullptr},
    {"highest", py_highest, METH_VARARGS, nullptr},
    {"draw", py_draw, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, NAME, nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC INIT() { return PyModule_Create(&MODULE); }
