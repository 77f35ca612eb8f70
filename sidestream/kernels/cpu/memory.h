// Aligned memory that is owned: weights in few large blocks (huge pages where the system has them), buffers that only grow.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sidestream {

struct Free {
    void operator()(void* p) const { std::free(p); }
};

constexpr std::size_t HUGE_PAGE = std::size_t{2} << 20;

// Memory for a long time; what is large lies in huge pages where the system has them.
inline std::unique_ptr<void, Free> aligned(std::size_t bytes) {
    const std::size_t alignment = bytes < HUGE_PAGE ? 64 : HUGE_PAGE;
    bytes = (bytes + alignment - 1) / alignment * alignment;
    void* p = std::aligned_alloc(alignment, bytes);
    if (!p) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (alignment == HUGE_PAGE) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return std::unique_ptr<void, Free>(p);
}

// Memory of the weights: never given back piece by piece.
class Arena {
public:
    void* allocate(std::size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        if (blocks_.empty() || used_ + bytes > size_) {
            size_ = bytes > BLOCK ? bytes : BLOCK;
            blocks_.push_back(aligned(size_));
            used_ = 0;
        }
        void* p = static_cast<char*>(blocks_.back().get()) + used_;
        used_ += bytes;
        total_ += bytes;
        return p;
    }
    std::size_t total() const { return total_; }

private:
    static constexpr std::size_t BLOCK = std::size_t{32} << 20;
    std::vector<std::unique_ptr<void, Free>> blocks_;
    std::size_t used_ = 0, size_ = 0, total_ = 0;
};

// A buffer whose content does not outlive `reserve`. Zeroed when it grows.
template <class T> class Buffer {
public:
    T* reserve(std::size_t count) {
        if (count > count_) {
            data_ = aligned(count * sizeof(T));
            count_ = count;
            for (std::size_t i = 0; i < count; i++) get()[i] = T{};
        }
        return get();
    }
    T* get() { return static_cast<T*>(data_.get()); }

private:
    std::unique_ptr<void, Free> data_;
    std::size_t count_ = 0;
};

}  // namespace sidestream
