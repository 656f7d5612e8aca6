// Checks of the router's compiled code. Bodies are cut off and damaged anywhere, and end where their memory ends, so
// that a sanitizer sees every read behind them: a bytes object of Python has a zero there. A tree is filled and emptied
// at random. Compiled and run by test_native.py and tools/sanitize.py.
#ifndef QUIRE_SOURCE
#define QUIRE_SOURCE "none"
#endif
#include "serving/router/native.cpp"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr size_t MAX_CHUNKS = 300, CHUNK_BYTES = 5;
using Random = std::mt19937_64;

const std::string BODIES[] = {
    R"({"model":"m","messages":[{"role":"user","content":"Grüße \u00fc\ud83d\ude00 日本 \n\"'"}],"top_p":0.7})",
    R"({"messages":[{"content":[{"type":"text","text":"t"},{"image_url":{"url":"data:image/png;base64,QUJDQUJDQUJ"}}],)"
    R"("role":"user"}, {"role":"a","content":null,"tool_calls":[{"f":{"arguments":"{\"x\": \"\\n\"}"}}]}, "x", []]})",
    R"({"system":[{"text":"s"}],"tools":[{"parameters":{"minimum":-0.5,"enum":[1,true,null,"\u0001\/"]}}],"text":"i"})",
    R"({"cache_salt":"sß","user":"u","input":[1,22,-333,0.25,12345678901234567890,1e5],"previous_response_id":"r"})",
    R"({ "prompt" : [ "a b" , { } , [ ] , false ] , "documents" : [{"text":"d"}], "lora_path" : "l" })",
};
const std::string PIECES[] = {
    "\"", "\\", "{", "}", "[", "]", ",", ":", "0", "-", ".", "e9", "\xff", "\xc3", "\xed\xa0\x80", "\xf0\x9f\x98",
    "\\u", "\\ud83d", "\n", std::string(1, '\0'), "null", "tru", "\"role\":1,", "\"text\":null,", std::string(16, 'x'),
    std::string(70, '['),
};

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(1);
}

template <size_t N>
const std::string& one_of(const std::string (&all)[N], Random& random) {
    return all[random() % N];
}

void read(const std::string& body, const std::vector<int64_t>& ends, bool is_fork) {
    std::vector<int64_t> found(NUM_FOUND + ends.size());
    const std::vector<char> exact(body.begin(), body.end());  // a string has a zero behind it
    const Reader reader{{1, 2, 3, 4}, ends.data(), static_cast<int64_t>(ends.size()), found.data()};
    const auto size = static_cast<int64_t>(exact.size());
    const int64_t count = quire_read_prompt(&reader, exact.data(), size, "tenant", 6, is_fork);
    expect(count >= 0 && count <= static_cast<int64_t>(found.size()), "more numbers than there is room for");
    for (int place = 0; count > 0 && place < 6; place += 2)
        expect(found[place] >= 0 && found[place] <= found[place + 1] && found[place + 1] <= size,
               "a string outside of the body");
}

void damage(std::string& body, Random& random) {
    const size_t place = random() % (body.size() + 1), count = random() % 20;
    switch (random() % 4) {
        case 0: body.insert(place, one_of(PIECES, random)); break;
        case 1: body.erase(place, count); break;
        case 2: body.insert(place, body.substr(place, count)); break;
        default: if (place < body.size()) body[place] ^= static_cast<char>(1u << (random() % 8));
    }
}

void check_reader(Random& random) {
    std::vector<int64_t> ends(MAX_CHUNKS);
    for (size_t place = 0; place < ends.size(); ++place) ends[place] = static_cast<int64_t>(place * CHUNK_BYTES);
    for (const std::string& body : BODIES)
        for (size_t length = 0; length <= body.size(); ++length) read(body.substr(0, length), ends, length % 2 == 0);
    for (int round = 0; round < 30'000; ++round) {
        std::string body = one_of(BODIES, random);
        for (size_t left = random() % 4; left > 0; --left) damage(body, random);
        ends.resize(random() % 4 == 0 ? 1 + random() % 20 : MAX_CHUNKS);  // of a short prompt the end is cut off
        for (size_t place = 0; place < ends.size(); ++place) ends[place] = static_cast<int64_t>(place * CHUNK_BYTES);
        read(body, ends, random() % 2 == 0);
    }
}

int64_t key_of(uint64_t root, uint64_t place) {
    return static_cast<int64_t>(mix(root + 1, 0xbf58476d1ce4e5b9u) + (place + 1) * 0x94d049bb133111ebu);
}

// After every step each chunk that could be held is looked for: one that is removed must not hide those behind it.
void check_tree(Random& random) {
    const std::vector<int64_t> ends = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    for (int round = 0; round < 200; ++round) {
        PrefixTree tree;
        const int64_t most = round % 2 == 0 ? 30 : 200;  // 30: the smallest table, whose end is near
        for (int step = 0; step < 200; ++step) {
            const auto size = static_cast<int64_t>(random() % ends.size());
            const auto capacity = static_cast<int64_t>(random() % 40);
            const uint64_t root = random() % 30;
            std::vector<int64_t> keys;
            for (uint64_t place = 0; place < static_cast<uint64_t>(size); ++place) keys.push_back(key_of(root, place));
            quire_insert(&tree, keys.data(), size, size, -1, ends.data(), step % 2 == 0 ? most : capacity);
            std::set<int64_t> held;
            for (uint64_t other = 0; other < 30; ++other)
                for (uint64_t place = 0; place < 8; ++place)
                    if (const int64_t key = key_of(other, place); tree.match(&key, 1) == 1) held.insert(key);
            expect(static_cast<int64_t>(held.size()) == tree.size(), "a chunk that is held is not found");
            expect(tree.num_bytes() == tree.size(), "the bytes are not those of the chunks");
            if (step % 50 == 49) tree.clear();
        }
        tree.evict(-1);
        expect(tree.size() == 0 && tree.num_bytes() == 0, "an empty tree holds something");
    }
}

}  // namespace

int main() {
    Random random(0);
    check_reader(random);
    check_tree(random);
}
