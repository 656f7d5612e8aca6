// The compiled form of PythonTree in prefix_tree.py: chunk keys in a hash table with open addressing, on an LRU list.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

class PrefixTree {
  public:
    PrefixTree() { clear(); }

    int64_t num_bytes() const { return num_bytes_; }
    int64_t size() const { return static_cast<int64_t>(size_); }

    void clear() {
        entries_.assign(1, {});  // entry 0 is the list head, between the newest and the oldest
        slots_.assign(64, 0);
        unused_ = 0;
        size_ = 0;
        num_bytes_ = 0;
    }

    int64_t match(const int64_t* keys, int64_t count) const {
        if (count == 0 || !find(keys[0])) return 0;
        if (find(keys[count - 1])) return count;
        int64_t low = 1, high = count - 1;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (find(keys[middle])) low = middle + 1;
            else high = middle;
        }
        return low;
    }

    // Insert the first `count` chunks and make them the most recently used. The tree already holds the first `held` of
    // them. `ends[i]` is the number of bytes in the first i chunks of a prompt.
    void insert(const int64_t* keys, int64_t count, int64_t held, const int64_t* ends) {
        for (int64_t place = count - 1; place >= held; --place) add(keys[place], ends[place + 1] - ends[place]);
        for (int64_t place = held - 1; place >= 0; --place) {
            if (const uint32_t entry = find(keys[place])) {
                unlink(entry);
                link_newest(entry);
            }
        }
    }

    void evict(int64_t capacity) {
        while (size_ > 0 && num_bytes_ > capacity) remove(entries_[0].newer);
    }

  private:
    struct Entry {
        int64_t key, bytes;
        uint32_t newer, older;  // in a free entry, `newer` is the next free entry
    };

    size_t slot_of(int64_t key) const {
        return static_cast<size_t>(static_cast<uint64_t>(key) * 0x9e3779b97f4a7c15u >> 20) & (slots_.size() - 1);
    }
    size_t after(size_t slot) const { return (slot + 1) & (slots_.size() - 1); }

    // Return the index of a key's entry, or 0 if the key is not held.
    uint32_t find(int64_t key) const {
        size_t slot = slot_of(key);
        while (slots_[slot] != 0 && entries_[slots_[slot]].key != key) slot = after(slot);
        return slots_[slot];
    }

    void add(int64_t key, int64_t bytes) {
        if (find(key)) return;
        if (2 * (size_ + 1) > slots_.size()) grow();
        uint32_t entry = unused_;
        if (entry != 0) {
            unused_ = entries_[entry].newer;
        } else {
            entry = static_cast<uint32_t>(entries_.size());
            entries_.push_back({});
        }
        entries_[entry] = {key, bytes, 0, 0};
        put(entry);
        link_newest(entry);
        ++size_;
        num_bytes_ += bytes;
    }

    void put(uint32_t entry) {
        size_t slot = slot_of(entries_[entry].key);
        while (slots_[slot] != 0) slot = after(slot);
        slots_[slot] = entry;
    }

    void grow() {
        slots_.assign(2 * slots_.size(), 0);
        for (uint32_t entry = entries_[0].newer; entry != 0; entry = entries_[entry].newer) put(entry);
    }

    void remove(uint32_t entry) {
        size_t slot = slot_of(entries_[entry].key);
        while (slots_[slot] != entry) slot = after(slot);
        // closes the gap: moves back the entries that linear probing had placed after it
        for (size_t next = after(slot); slots_[next] != 0; next = after(next)) {
            const size_t home = slot_of(entries_[slots_[next]].key);
            const bool is_between = slot < next ? slot < home && home <= next : slot < home || home <= next;
            if (is_between) continue;
            slots_[slot] = slots_[next];
            slot = next;
        }
        slots_[slot] = 0;
        unlink(entry);
        num_bytes_ -= entries_[entry].bytes;
        --size_;
        entries_[entry].newer = unused_;
        unused_ = entry;
    }

    void unlink(uint32_t entry) {
        entries_[entries_[entry].newer].older = entries_[entry].older;
        entries_[entries_[entry].older].newer = entries_[entry].newer;
    }

    // The list is a ring through entry 0: `newer` of entry 0 is the oldest entry, and its `older` is the newest.
    void link_newest(uint32_t entry) {
        const uint32_t newest = entries_[0].older;
        entries_[entry].older = newest;
        entries_[entry].newer = 0;
        entries_[newest].newer = entry;
        entries_[0].older = entry;
    }

    std::vector<Entry> entries_;
    std::vector<uint32_t> slots_;  // hash table with linear probing: entry indices, 0 in a free slot
    uint32_t unused_ = 0;
    size_t size_ = 0;
    int64_t num_bytes_ = 0;
};

}  // namespace quire
