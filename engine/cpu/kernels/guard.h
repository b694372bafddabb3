// Checks of arguments before an address in them is followed; exceptions in parallel regions.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

namespace decant {

// Throws std::invalid_argument (ValueError in Python) with the field, its limit and its value.
[[noreturn, gnu::noinline, gnu::cold]] inline void refuse(const char* field, const char* limit, int64_t value) {
    throw std::invalid_argument(std::string(field) + ": " + limit + ", got " + std::to_string(value));
}

inline void require(bool valid, const char* field, const char* limit, int64_t value) {
    if (!valid) refuse(field, limit, value);
}

inline void check_positive(const char* field, int64_t value) { require(value >= 1, field, "at least 1", value); }
inline void check_count(const char* field, int64_t value) { require(value >= 0, field, "at least 0", value); }
inline void check_equal(const char* field, int64_t value, int64_t expected) {
    if (value != expected) refuse(field, std::to_string(expected).c_str(), value);
}
inline void check_address(const char* field, const void* address) { require(address, field, "an address", 0); }
inline void check_threads(int64_t threads) {
    require(threads >= 1 && threads <= 4096, "threads", "from 1 to 4096", threads);
}

// An exception that leaves an OpenMP region ends the process. `run` runs the region's body and keeps the first
// exception of all threads; `rethrow`, after the region, throws it in the calling thread.
class Guard {
public:
    template <class F>
    void run(const F& body) noexcept {
        try {
            body();
        } catch (...) {
            if (!taken.test_and_set()) caught = std::current_exception();
        }
    }

    void rethrow() const {
        if (caught) std::rethrow_exception(caught);
    }

private:
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    std::exception_ptr caught;
};

}  // namespace decant
