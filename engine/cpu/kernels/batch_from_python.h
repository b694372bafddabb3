// Flattens the rows of a step (engine/model/step_batch.py), read from the scheduler's tuples. Needs the interpreter's
// lock throughout. A function that fails returns with Python's error set.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "step.h"

namespace decant {

struct FlatRow {
    PyObject* row;
    PyObject* tokens;  // a list or tuple; a reference is owned
    int64_t start, end, sampled;

    int64_t count() const { return end - start; }
    bool single() const { return count() == 1; }
};

class Flattening {
  public:
    ~Flattening() {
        for (FlatRow& row : rows_) Py_DECREF(row.tokens);
        for (Py_buffer& blocks : blocks_) PyBuffer_Release(&blocks);
    }

    bool read(PyObject* rows, int64_t size) {
        if (size < 1) {
            PyErr_Format(PyExc_ValueError, "block_size: at least 1, got %lld", (long long)size);
            return false;
        }
        const Py_ssize_t count = PySequence_Fast_GET_SIZE(rows);
        rows_.reserve(count);
        size_ = size;
        for (Py_ssize_t i = 0; i < count; ++i)
            if (!take(PySequence_Fast_GET_ITEM(rows, i))) return false;
        order_.resize(count);
        std::iota(order_.begin(), order_.end(), 0);
        std::stable_sort(order_.begin(), order_.end(), [this](int64_t a, int64_t b) {
            const FlatRow &one = rows_[a], &other = rows_[b];
            if (one.single() != other.single()) return one.single();
            return one.single() && one.end > other.end;
        });
        return true;
    }

    // (rows in order, row_table, flattened, new_blocks, block tables, cache groups, width of a table); see flatten in
    // engine/cpu/backend.py
    PyObject* to_python(int32_t blank) {
        const int64_t size = size_;
        const int64_t n = rows_.size();
        int64_t total = 0, width = 0;
        for (const FlatRow& row : rows_) {
            total += row.count();
            width = std::max(width, (row.end + size - 1) / size);
        }
        PyObject* ordered = PyList_New(n);
        PyObject* row_table = bytes(ROW_FIELDS * n * sizeof(int64_t));
        PyObject* flat = bytes((2 + groups_) * total * sizeof(int64_t));
        PyObject* table = bytes(groups_ * n * width * sizeof(int32_t));
        PyObject* new_blocks = nullptr;
        if (ordered && row_table && flat && table &&
            fill(ordered, at<int64_t>(row_table), at<int64_t>(flat), total, at<int32_t>(table), width, size, blank))
            new_blocks = bytes(new_blocks_.size() * sizeof(int64_t));
        if (!new_blocks) {
            for (PyObject* one : {ordered, row_table, flat, table}) Py_XDECREF(one);
            return nullptr;
        }
        std::copy(new_blocks_.begin(), new_blocks_.end(), at<int64_t>(new_blocks));
        return Py_BuildValue("(NNNNNnn)", ordered, row_table, flat, new_blocks, table,
                             static_cast<Py_ssize_t>(groups_), static_cast<Py_ssize_t>(width));
    }

  private:
    static PyObject* bytes(int64_t length) { return PyByteArray_FromStringAndSize(nullptr, length); }

    template <class E>
    static E* at(PyObject* bytes) { return reinterpret_cast<E*>(PyByteArray_AS_STRING(bytes)); }

    bool take(PyObject* row) {  // (request, tokens, start, end, blocks, sample, state)
        if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != 7) {
            PyErr_SetString(PyExc_TypeError, "rows are tuples of seven");
            return false;
        }
        FlatRow taken{row};
        taken.start = PyLong_AsLongLong(PyTuple_GET_ITEM(row, 2));
        taken.end = PyLong_AsLongLong(PyTuple_GET_ITEM(row, 3));
        taken.sampled = PyObject_IsTrue(PyTuple_GET_ITEM(row, 5));
        if (PyErr_Occurred()) return false;
        long long blocks = 0;
        if (!take_blocks(PyTuple_GET_ITEM(row, 4), blocks)) return false;
        taken.tokens = PySequence_Fast(PyTuple_GET_ITEM(row, 1), "tokens are a sequence");
        if (!taken.tokens) return false;
        const long long index = rows_.size();
        const long long length = PySequence_Fast_GET_SIZE(taken.tokens);
        rows_.push_back(taken);  // from here on the destructor releases it
        if (taken.start >= 0 && taken.start < taken.end && taken.end <= length && (taken.end - 1) / size_ < blocks)
            return true;
        PyErr_Format(PyExc_ValueError, "row %lld: positions %lld to %lld of %lld tokens in %lld blocks", index,
                     (long long)taken.start, (long long)taken.end, length, blocks);
        return false;
    }

    // Appends a row's block tables to `blocks_`; `fewest`: entries of the shortest one.
    bool take_blocks(PyObject* tables, long long& fewest) {
        const Py_ssize_t groups = PyTuple_Check(tables) ? PyTuple_GET_SIZE(tables) : 0;
        if (rows_.empty()) groups_ = groups;
        if (!groups || groups != groups_) {
            PyErr_SetString(PyExc_TypeError, "block tables are a tuple of one array for each cache group");
            return false;
        }
        for (Py_ssize_t group = 0; group < groups; ++group) {
            Py_buffer blocks;
            if (PyObject_GetBuffer(PyTuple_GET_ITEM(tables, group), &blocks, PyBUF_FORMAT | PyBUF_ND)) return false;
            blocks_.push_back(blocks);  // from here on the destructor releases it
            if (blocks.itemsize != sizeof(int32_t) || !blocks.format || std::strcmp(blocks.format, "i")) {
                PyErr_SetString(PyExc_TypeError, "block tables are arrays of int32");
                return false;
            }
            const long long count = blocks.len / sizeof(int32_t);
            fewest = group ? std::min(fewest, count) : count;
        }
        return true;
    }

    bool fill(PyObject* ordered, int64_t* row_table, int64_t* flat, int64_t total, int32_t* table, int64_t width,
              int64_t size, int32_t blank) {
        const int64_t n = rows_.size();
        int64_t first = 0;
        for (int64_t i = 0; i < n; ++i, table += width) {
            const FlatRow& row = rows_[order_[i]];
            const int64_t needed = (row.end + size - 1) / size;
            for (int64_t group = 0; group < groups_; ++group) {
                int32_t* entries = table + group * n * width;
                std::memcpy(entries, blocks_[order_[i] * groups_ + group].buf, needed * sizeof(int32_t));
                std::fill(entries + needed, entries + width, blank);
            }
            int64_t* column = row_table + i;
            column[ORDER * n] = order_[i];
            column[START * n] = row.start;
            column[END * n] = row.end;
            column[FIRST * n] = first;
            column[STOP * n] = first + row.count();
            column[SAMPLED * n] = row.sampled;
            for (int64_t position = row.start; position < row.end; ++position, ++first) {
                const int64_t token = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(row.tokens, position));
                if (token == -1 && PyErr_Occurred()) return false;
                flat[first] = token;
                flat[total + first] = position;
                const int64_t slot = position % size;
                const bool is_new = !slot && position + size > row.end;
                for (int64_t group = 0; group < groups_; ++group) {
                    const int64_t block = table[group * n * width + position / size];
                    flat[(2 + group) * total + first] = block * size + slot;
                    if (is_new) new_blocks_.push_back(block);
                }
            }
            Py_INCREF(row.row);
            PyList_SET_ITEM(ordered, i, row.row);
        }
        return true;
    }

    int64_t size_ = 1;  // tokens per block
    int64_t groups_ = 1;
    std::vector<FlatRow> rows_;
    std::vector<Py_buffer> blocks_;  // of int32: the tables of each row
    std::vector<int64_t> order_, new_blocks_;
};

}  // namespace decant
