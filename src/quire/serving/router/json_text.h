// Parses JSON in place: validates values, skips them, and copies them in the form in which msgspec would encode them.
#pragma once
#include "json_runs.h"

namespace quire {

constexpr int MAX_DEPTH = 64;     // levels of nested arrays and objects
constexpr int MAX_MEMBERS = 64;   // most members of an object whose names are compared
constexpr int MAX_NUMBER = 40;    // most bytes of a number: without an exponent, a shorter one cannot overflow
constexpr int EXACT_DIGITS = 15;  // up to so many digits, the shortest form of a double is unique
constexpr int INTEGER_DIGITS = 18;

// A range of bytes of the body. `begin` is null if there is none.
struct Span {
    const Byte* begin = nullptr;
    const Byte* end = nullptr;

    size_t size() const { return static_cast<size_t>(end - begin); }
    explicit operator bool() const { return begin != nullptr; }
    bool has_escape() const { return std::memchr(begin, '\\', size()) != nullptr; }
    std::string_view text() const { return {reinterpret_cast<const char*>(begin), size()}; }
};

inline const Byte* skip_space(const Byte* at, const Byte* end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) ++at;
    return at;
}

// Skip white space and return the byte at `at`, which then points to it. Throws Unsure at the end of the text.
inline Byte peek(const Byte*& at, const Byte* end) {
    at = skip_space(at, end);
    if (at == end) throw Unsure{};
    return *at;
}

inline void expect(const Byte*& at, const Byte* end, Byte byte) {
    if (peek(at, end) != byte) throw Unsure{};
    ++at;
}

// ------------------------------------------------------------------------------------------------------- strings
inline unsigned hex4(const Byte* at, const Byte* end) {
    if (end - at < 4) throw Unsure{};
    unsigned value = 0;
    for (int place = 0; place < 4; ++place) {
        const Byte byte = at[place], lower = byte | 0x20;
        const bool is_decimal = byte >= '0' && byte <= '9';
        const unsigned digit = is_decimal ? byte - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : 16;
        if (digit == 16) throw Unsure{};
        value = value << 4 | digit;
    }
    return value;
}

// Decode the escape sequence after a backslash and move `at` past it. Returns the code point.
inline unsigned read_escape(const Byte*& at, const Byte* end) {
    if (at == end) throw Unsure{};
    switch (*at++) {
        case '"': return '"';
        case '\\': return '\\';
        case '/': return '/';
        case 'b': return '\b';
        case 'f': return '\f';
        case 'n': return '\n';
        case 'r': return '\r';
        case 't': return '\t';
        case 'u': break;
        default: throw Unsure{};
    }
    const unsigned first = hex4(at, end);
    at += 4;
    if (first < 0xd800 || first > 0xdfff) return first;
    if (first > 0xdbff || end - at < 6 || at[0] != '\\' || at[1] != 'u') throw Unsure{};
    const unsigned second = hex4(at + 2, end);
    if (second < 0xdc00 || second > 0xdfff) throw Unsure{};
    at += 6;
    return 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
}

// Skip a run of characters outside ASCII. Throws Unsure for invalid UTF-8.
inline const Byte* check_utf8(const Byte* at, const Byte* end) {
    while (at < end && *at >= 0x80) {
        const unsigned first = *at;
        const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
        if (first < 0xc2 || first > 0xf4 || end - at <= more) throw Unsure{};
        const unsigned second = at[1];
        const unsigned least = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
        const unsigned most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
        if (second < least || second > most) throw Unsure{};
        for (int place = 2; place <= more; ++place)
            if ((at[place] & 0xc0) != 0x80) throw Unsure{};
        at += more + 1;
    }
    return at;
}

// Validate a string. `at` is after its opening quote. Returns the position after its closing quote.
inline const Byte* check_string(const Byte* at, const Byte* end) {
    for (;;) {
        at = find_special<true>(at, end);
        if (*at == '"') return at + 1;
        if (*at == '\\') read_escape(++at, end);
        else at = check_utf8(at, end);  // throws for control characters too
        if (at < end && *at < 0x20) throw Unsure{};
    }
}

inline void put_character(unsigned code, Writer& out) {
    if (code < 0x80) return out.add(static_cast<char>(code));
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    out.add(static_cast<char>((more == 1 ? 0xc0 : more == 2 ? 0xe0 : 0xf0) | code >> (6 * more)));
    for (int left = more - 1; left >= 0; --left) out.add(static_cast<char>(0x80 | (code >> (6 * left) & 0x3f)));
}

// Write the decoded text of a validated string. `at` is after its opening quote. Returns the position after its closing
// quote.
inline const Byte* put_text(const Byte* at, const Byte* end, Writer& out) {
    for (;;) {
        const Byte* stop = put_plain(at, end, out);
        at = stop + 1;
        if (*stop == '"') return at;
        put_character(read_escape(at, end), out);
    }
}

// Write a validated string as JSON, with escapes only where JSON requires them. `at` and the result are as in put_text.
inline const Byte* put_string(const Byte* at, const Byte* end, Writer& out) {
    out.add('"');
    for (;;) {
        const Byte* stop = put_plain(at, end, out);
        at = stop + 1;
        if (*stop == '"') break;
        const unsigned code = read_escape(at, end);
        constexpr char SHORT[] = "\"\\\b\f\n\r\t", LETTERS[] = "\"\\bfnrt", HEX[] = "0123456789abcdef";
        if (const void* found = code != 0 && code < 0x80 ? std::strchr(SHORT, static_cast<int>(code)) : nullptr) {
            out.add('\\');
            out.add(LETTERS[static_cast<const char*>(found) - SHORT]);
        } else if (code < 0x20) {
            out.add(code < 0x10 ? "\\u000" : "\\u001");
            out.add(HEX[code & 0xf]);
        } else {
            put_character(code, out);
        }
    }
    out.add('"');
    return at;
}

// ------------------------------------------------------------------------------------------------ numbers and words
inline const Byte* check_digits(const Byte* at, const Byte* end) {
    const Byte* begin = at;
    while (at < end && *at >= '0' && *at <= '9') ++at;
    if (at == begin) throw Unsure{};
    return at;
}

// Validate a number. If `is_written`, throws Unsure unless msgspec would encode it in the same form. Returns its end.
inline const Byte* check_number(const Byte* at, const Byte* end, bool is_written) {
    const Byte* begin = at;
    if (*at == '-') ++at;
    const Byte* whole = at;
    at = check_digits(at, end);
    const long integer_digits = at - whole;
    if (*whole == '0' && integer_digits > 1) throw Unsure{};
    const bool is_zero = *whole == '0';
    if (at < end && *at == '.') {
        const Byte* fraction = at + 1;
        at = check_digits(fraction, end);
        const long digits = at - fraction;
        // msgspec writes values below 0.0001 with an exponent
        const bool is_plain = (digits == 1 || at[-1] != '0') && integer_digits + digits <= EXACT_DIGITS &&
                              !(is_zero && digits > 3 && std::memcmp(fraction, "000", 3) == 0);
        if (is_written && !is_plain) throw Unsure{};
    } else if (is_written && (integer_digits > INTEGER_DIGITS || (is_zero && whole != begin))) {
        throw Unsure{};
    }
    if (at < end && (*at | 0x20) == 'e') {
        if (++at < end && (*at == '+' || *at == '-')) ++at;
        const Byte* exponent = at;
        at = check_digits(at, end);
        if (is_written || at - exponent > 2) throw Unsure{};
    }
    if (at - begin > MAX_NUMBER) throw Unsure{};
    return at;
}

inline const Byte* check_word(const Byte* at, const Byte* end) {
    const char* word = *at == 't' ? "true" : *at == 'f' ? "false" : "null";
    const size_t length = std::strlen(word);
    if (static_cast<size_t>(end - at) < length || std::memcmp(at, word, length) != 0) throw Unsure{};
    return at + length;
}

// ------------------------------------------------------------------------------------------------------- containers
// Iterate over an array. `at` is at its opening bracket. `each(at)` reads one item and returns its end. Returns the
// position after the closing bracket.
template <class Each>
const Byte* each_item(const Byte* at, const Byte* end, Each each) {
    if (peek(++at, end) == ']') return at + 1;
    for (;;) {
        peek(at, end);
        at = each(at);
        if (peek(at, end) == ']') return at + 1;
        expect(at, end, ',');
    }
}

// Iterate over an object. `at` is at its opening brace. `each(name, at)` reads the value of a member and returns its
// end; `name` is the text between the quotes, escapes not decoded. Returns the position after the closing brace.
template <class Each>
const Byte* each_member(const Byte* at, const Byte* end, Each each) {
    if (peek(++at, end) == '}') return at + 1;
    for (;;) {
        expect(at, end, '"');
        const Byte* name = at;
        at = check_string(at, end);
        const Span span{name, at - 1};
        expect(at, end, ':');
        peek(at, end);
        at = each(span, at);
        if (peek(at, end) == '}') return at + 1;
        expect(at, end, ',');
    }
}

// The member names of one object. `add` throws Unsure for a name with escapes, for a duplicate, and beyond MAX_MEMBERS.
class Names {
  public:
    void add(const Span& name) {
        if (count_ == MAX_MEMBERS || name.has_escape()) throw Unsure{};
        for (int place = 0; place < count_; ++place)
            if (sizes_[place] == name.size() && std::memcmp(begins_[place], name.begin, name.size()) == 0)
                throw Unsure{};
        begins_[count_] = name.begin;
        sizes_[count_++] = name.size();
    }
    int count() const { return count_; }

  private:
    int count_ = 0;
    const Byte* begins_[MAX_MEMBERS];  // only the first `count_` are initialized
    size_t sizes_[MAX_MEMBERS];
};

// Validate any value. Returns its end.
inline const Byte* check_value(const Byte* at, const Byte* end, int depth) {
    if (depth > MAX_DEPTH) throw Unsure{};
    switch (*at) {
        case '"': return check_string(at + 1, end);
        case '{': return each_member(at, end, [&](const Span&, const Byte* value) {
            return check_value(value, end, depth + 1);
        });
        case '[': return each_item(at, end, [&](const Byte* item) { return check_value(item, end, depth + 1); });
        case 't': case 'f': case 'n': return check_word(at, end);
        default: return check_number(at, end, false);
    }
}

// Write a validated value in the form in which msgspec would encode it after decoding it. Returns its end.
inline const Byte* put_value(const Byte* at, const Byte* end, Writer& out) {
    switch (*at) {
        case '"': return put_string(at + 1, end, out);
        case '{': {
            Names names;
            out.add('{');
            at = each_member(at, end, [&](const Span& name, const Byte* value) {
                if (names.count() > 0) out.add(',');
                names.add(name);
                out.add('"');
                out.add(name.begin, name.size());
                out.add("\":");
                return put_value(value, end, out);
            });
            out.add('}');
            return at;
        }
        case '[': {
            bool is_first = true;
            out.add('[');
            at = each_item(at, end, [&](const Byte* item) {
                if (!is_first) out.add(',');
                is_first = false;
                return put_value(item, end, out);
            });
            out.add(']');
            return at;
        }
        default: {
            const bool is_word = *at == 't' || *at == 'f' || *at == 'n';
            const Byte* stop = is_word ? check_word(at, end) : check_number(at, end, true);
            out.add(at, static_cast<size_t>(stop - at));
            return stop;
        }
    }
}

// Whether Python would treat a validated value as true: not empty, false or null. Throws Unsure for a number.
inline bool is_true(const Byte* at, const Byte* end) {
    switch (*at) {
        case '"': return at[1] != '"';
        case '{': return peek(++at, end) != '}';
        case '[': return peek(++at, end) != ']';
        case 't': return true;
        case 'f': case 'n': return false;
        default: throw Unsure{};  // a number
    }
}

}  // namespace quire
