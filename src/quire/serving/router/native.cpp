// Parses a request's JSON body like read_by_msgspec in prompt_keys.py: one pass over the body, one over the prompt.
// Bodies that are invalid or have a rare form are left to prompt_keys.py. Also exports PrefixTree.
#include <new>

#include "json_text.h"
#include "prefix_tree.h"

namespace quire {
namespace {

// ---------------------------------------------------------------------------------------------------------- hashes
inline uint64_t mix(uint64_t one, uint64_t other) {
    const unsigned __int128 product = static_cast<unsigned __int128>(one) * other;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t load(const Byte* data) {
    uint64_t value;
    std::memcpy(&value, data, 8);
    return value;
}

// A keyed hash like wyhash: multiplies 64-bit words and folds each 128-bit product. `secrets` are four random words.
uint64_t hash_bytes(const uint64_t* secrets, uint64_t key, const Byte* data, size_t size) {
    uint64_t one = mix(key ^ secrets[0], secrets[1]) ^ size, two = one, three = one;
    size_t left = size;
    for (; left >= 48; left -= 48, data += 48) {
        one = mix(load(data) ^ secrets[0], load(data + 8) ^ one);
        two = mix(load(data + 16) ^ secrets[1], load(data + 24) ^ two);
        three = mix(load(data + 32) ^ secrets[2], load(data + 40) ^ three);
    }
    one ^= mix(two ^ secrets[1], three ^ secrets[2]);
    for (; left >= 16; left -= 16, data += 16) one = mix(load(data) ^ secrets[2], load(data + 8) ^ one);
    Byte last[16] = {};
    if (left > 0) std::memcpy(last, data, left);
    one = mix(load(last) ^ secrets[1], load(last + 8) ^ one);
    return mix(one ^ secrets[3], size ^ secrets[2]);
}

// ---------------------------------------------------------------------------------------------------------- fields
enum Field {
    MODEL, LORA_PATH,
    SESSION_ID, PROMPT_CACHE_KEY, USER, CACHE_SALT,
    PREVIOUS_RESPONSE_ID, INPUT_FILE_ID, REQUEST_ID,
    SYSTEM, INSTRUCTIONS, TOOLS, FUNCTIONS, DOCUMENTS, TEMPLATE,
    MESSAGES, INPUT,
    PROMPT, INPUT_IDS, TEXT, TEXTS, QUERY, CONTENT, INPUT_PREFIX,
    NUM_FIELDS,
};
constexpr std::string_view FIELD_NAMES[NUM_FIELDS] = {
    "model", "lora_path",
    "session_id", "prompt_cache_key", "user", "cache_salt",
    "previous_response_id", "input_file_id", "request_id",
    "system", "instructions", "tools", "functions", "documents", "template",
    "messages", "input",
    "prompt", "input_ids", "text", "texts", "query", "content", "input_prefix",
};
constexpr Field MODELS[] = {MODEL, LORA_PATH}, SALTS[] = {CACHE_SALT}, FORKED[] = {REQUEST_ID};
constexpr Field SESSIONS[] = {SESSION_ID, PROMPT_CACHE_KEY, USER, CACHE_SALT};
constexpr Field ANSWERS[] = {PREVIOUS_RESPONSE_ID, INPUT_FILE_ID};
constexpr Field BEFORE[] = {SYSTEM, INSTRUCTIONS, TOOLS, FUNCTIONS, DOCUMENTS, TEMPLATE};
constexpr Field PROMPTS[] = {PROMPT, INPUT, INPUT_IDS, TEXT, TEXTS, QUERY, DOCUMENTS, CONTENT, INPUT_PREFIX};
constexpr std::string_view MESSAGE_PARTS[] = {"reasoning_content", "tool_calls", "images"};

int find_field(std::string_view name) {
    int field = 0;
    while (field < NUM_FIELDS && name != FIELD_NAMES[field]) ++field;
    return field;
}

// A parsed body: the position of each known field, and a function that writes the prompt text.
class Body {
  public:
    Body(const Byte* begin, const Byte* end, Writer& text) : end_(end), text_(text) {
        if (peek(begin, end) != '{') throw Unsure{};
        const Byte* at = each_member(begin, end, [&](const Span& name, const Byte* value) {
            if (name.has_escape()) throw Unsure{};
            const Byte* stop = check_value(value, end, 1);
            fields_[find_field(name.text())] = {value, stop};  // of fields with the same name, the last one counts
            return stop;
        });
        if (skip_space(at, end) != end) throw Unsure{};
    }

    // Return the first of `fields` whose value is a string that is not empty, with its quotes.
    template <size_t N>
    Span first_text(const Field (&fields)[N]) const {
        for (const Field field : fields)
            if (const Span value = fields_[field]; value && *value.begin == '"' && value.size() > 2) return value;
        return {};
    }

    // Write the prompt, in the order in which chat templates render it.
    void put_prompt() {
        for (const Field field : BEFORE) put_field(field);
        for (const Field field : {MESSAGES, INPUT}) {
            const Span list = fields_[field];
            if (!list || *list.begin != '[') continue;
            const Byte* first = list.begin + 1;
            if (peek(first, end_) != '{') continue;
            each_item(list.begin, end_, [&](const Byte* message) { return put_message(message); });
            return;
        }
        for (const Field field : PROMPTS) put_field(field);
    }

  private:
    void put_field(Field field) {
        if (const Span value = fields_[field]) put_part(value.begin);
    }

    void begin_part() {
        if (has_part_) text_.add('\0');
        has_part_ = true;
    }

    // Append one part of the prompt: a string as its text, another value as JSON.
    const Byte* put_part(const Byte* value) {
        begin_part();
        return *value == '"' ? put_text(value + 1, end_, text_) : put_value(value, end_, text_);
    }

    const Byte* put_message(const Byte* message) {
        if (*message != '{') return put_part(message);
        Names names;
        bool has_role = false;
        const Byte *content = nullptr, *parts[3] = {};
        const Byte* stop = each_member(message, end_, [&](const Span& name, const Byte* value) {
            names.add(name);
            const std::string_view text = name.text();
            if (text == "role") {
                has_role = true;
                return put_part(value);
            }
            if (text == "content") {
                if (has_role) return put_content(value);
                content = value;
            }
            for (int part = 0; part < 3; ++part)
                if (text == MESSAGE_PARTS[part]) parts[part] = value;
            return check_value(value, end_, 1);
        });
        if (!has_role) begin_part();
        if (content != nullptr) put_content(content);
        for (const Byte* part : parts)
            if (names.count() > 2 && part != nullptr && is_true(part, end_)) put_part(part);
        return stop;
    }

    const Byte* put_content(const Byte* content) {
        if (*content == 'n') return check_value(content, end_, 1);
        if (*content != '[') return put_part(content);
        return each_item(content, end_, [&](const Byte* item) {
            if (*item != '{') return put_part(item);
            Names names;
            bool has_text = false;
            const Byte* stop = each_member(item, end_, [&](const Span& name, const Byte* value) {
                names.add(name);
                if (name.text() != "text" || *value == 'n') return check_value(value, end_, 1);
                has_text = true;
                return put_part(value);
            });
            return has_text ? stop : put_part(item);
        });
    }

    const Byte* end_;
    Writer& text_;
    bool has_part_ = false;
    Span fields_[NUM_FIELDS + 1];  // the last entry is for all other names
};

// The caller's state between calls. _Reader in native.py has the same layout.
struct Reader {
    uint64_t secrets[4];  // keys of hash_bytes
    const int64_t* ends;  // ends[i]: bytes in the first i chunks of a prompt
    int64_t num_ends;
    int64_t* found;       // output: the NUM_FOUND values of `quire_read_prompt`, then the chunk keys

    uint64_t hash(uint64_t key, const void* data, size_t size) const {
        return hash_bytes(secrets, key, static_cast<const Byte*>(data), size);
    }

    int64_t put_keys(uint64_t key, const Byte* text, size_t size, int64_t* keys) const {
        int64_t count = 0;
        for (; count + 1 < num_ends && static_cast<size_t>(ends[count + 1]) <= size; ++count) {
            key = hash(key, text + ends[count], static_cast<size_t>(ends[count + 1] - ends[count]));
            keys[count] = static_cast<int64_t>(key);
        }
        return count;
    }

    uint64_t hash_text(uint64_t key, Span text, const Byte* end, Writer& out) const {
        out.restart();
        if (text) put_text(text.begin + 1, end, out);
        if (out.kept() != out.total()) throw Unsure{};
        return hash(key, out.data(), out.kept());
    }
};

constexpr int NUM_FOUND = 7;

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" {

const char* quire_router_source() { return QUIRE_SOURCE; }

// Return the root of the chunk keys: a hash of the tenant, the cache salt and the model.
int64_t quire_prompt_root(const Reader* reader, const char* tenant, int64_t tenant_size, const char* salt,
                          int64_t salt_size, const char* model, int64_t model_size) {
    const uint64_t key = reader->hash(0, tenant, static_cast<size_t>(tenant_size));
    return static_cast<int64_t>(reader->hash(reader->hash(key, salt, static_cast<size_t>(salt_size)), model,
                                             static_cast<size_t>(model_size)));
}

// Write the keys of the whole chunks of `text` to `found`. Returns their number.
int64_t quire_chunk_keys(const Reader* reader, int64_t root, const char* text, int64_t size) {
    return reader->put_keys(static_cast<uint64_t>(root), reinterpret_cast<const Byte*>(text),
                            static_cast<size_t>(size), reader->found);
}

// Parse a body. Writes to `found` the begin and end offsets of the JSON strings of the model, the session and the
// stored object (0 and 0 if the body has none), the prompt's bytes, and the chunk keys. Returns the number of values
// written, 0 if msgspec must parse the body.
int64_t quire_read_prompt(const Reader* reader, const char* body, int64_t size, const char* tenant,
                          int64_t tenant_size, int64_t is_fork) {
    static thread_local Writer text;
    const Byte* begin = reinterpret_cast<const Byte*>(body);
    const Byte* end = begin + size;
    try {
        text.begin(static_cast<size_t>(reader->ends[reader->num_ends - 1]));  // bytes after the last chunk have no key
        Body read(begin, end, text);
        const Span model = read.first_text(MODELS);
        const Span strings[] = {model, read.first_text(SESSIONS),
                                is_fork ? read.first_text(FORKED) : read.first_text(ANSWERS)};
        int64_t* found = reader->found;
        for (const Span& string : strings) {
            *found++ = string ? string.begin - begin : 0;
            *found++ = string ? string.end - begin : 0;
        }
        uint64_t root = reader->hash(0, tenant, static_cast<size_t>(tenant_size));
        root = reader->hash_text(root, read.first_text(SALTS), end, text);
        root = reader->hash_text(root, model, end, text);
        text.restart();
        read.put_prompt();
        *found++ = static_cast<int64_t>(text.total());
        return NUM_FOUND + reader->put_keys(root, text.data(), text.kept(), found);
    } catch (...) {  // Unsure, or std::bad_alloc
        return 0;
    }
}

PrefixTree* quire_new_tree() { return new (std::nothrow) PrefixTree; }

void quire_delete_tree(PrefixTree* tree) { delete tree; }

void quire_clear_tree(PrefixTree* tree) { tree->clear(); }

int64_t quire_tree_bytes(const PrefixTree* tree) { return tree->num_bytes(); }

int64_t quire_tree_size(const PrefixTree* tree) { return tree->size(); }

int64_t quire_match(const PrefixTree* tree, const int64_t* keys, int64_t count) { return tree->match(keys, count); }

// Insert the first `count` chunks of a prompt, then evict the least recently used chunks beyond `capacity` bytes. The
// tree already holds the first `held` chunks (-1: compute it with `match`). Returns `held`.
int64_t quire_insert(PrefixTree* tree, const int64_t* keys, int64_t size, int64_t count, int64_t held,
                     const int64_t* ends, int64_t capacity) {
    if (held < 0) held = tree->match(keys, size);
    try {
        tree->insert(keys, count, held < count ? held : count, ends);
        tree->evict(capacity);
    } catch (const std::bad_alloc&) {
        tree->clear();  // safe: the tree is only an estimate of the replica's cache
    }
    return held;
}
}
