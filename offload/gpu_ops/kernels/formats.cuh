// How a lane reads packed weights (the layout is that of offload/cpu_ops/packing.py: tiles of 16
// rows, a block's sections one after the other, words of the 16 rows side by side).
//
// A warp takes a *chunk* of a tile: 256 columns of 16 rows. Lane = 4 * slot + group: the group has
// rows 4 group .. 4 group + 3, which are 16 neighbouring bytes of every word, the slot 32 of the
// columns, in two runs of 16: "low" and "high" as nibbles are. So four lanes read 64 bytes in one
// piece, a lane has four to eight loads of 16 bytes under way, and scales are unpacked once for 32
// columns of a row.
//
// A format says how many bytes a block of a tile has, how many columns a warp takes at once (STEP:
// plain floats take fewer), where a slot's runs start (LOW, HIGH), how
// raw bytes are loaded, and turned into eight words of four signed bytes (`unpack`). Its value is
//     SMALL: d * q + m         one d (and m) per 32 columns
//     LARGE: d * scale * q - dmin * minimum      integers per run, d and dmin per 256 columns
#pragma once
#include "lane.cuh"

constexpr int TILE_ROWS = 16;
constexpr int CHUNK = 256;
constexpr int RUN = 16;
constexpr u32 NIBBLES = 0x0f0f0f0fu;

enum Kind { SMALL, LARGE, PLAIN };

// Four float16 of a slot's rows, one after the other.
struct Halves {
    uint2 bits;
    DEVICE_MEMBER void load(const u8* at, int group) { bits = load8(at + 8 * group); }
    DEVICE_MEMBER float of(int row) const {
        const u32 pair = row < 2 ? bits.x : bits.y;
        return half_to_float(row & 1 ? pair >> 16 : pair & 0xffffu);
    }
};

// Signed bytes of fields of `bit`'s width and below: value - bit, for 0 <= value < 2 bit.
DEVICE u32 centred(u32 values, u32 bit) {
    const u32 flipped = values ^ (bit * 0x01010101u);
    return flipped | ((flipped & (bit * 0x01010101u)) * (256u / bit - 2u));
}

// Low and high nibbles of the four words of a run.
DEVICE void nibbles(const uint4 (&quants)[4], int row, u32 (&words)[8]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const u32 v = part(quants[k], row);
        words[k] = v & NIBBLES;
        words[4 + k] = (v >> 4) & NIBBLES;
    }
}

DEVICE void load_words(const u8* at, int group, uint4 (&words)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) words[k] = load16(at + 64 * k + 16 * group);
}

// Entries of a table of 16 signed bytes for four nibbles in bytes.
DEVICE u32 look_up(u32 t0, u32 t1, u32 t2, u32 t3, u32 indices) {
    // The four nibbles side by side, as `pick_bytes` takes them.
    const u32 close = (indices | (indices >> 4)) & 0x00ff00ffu;
    const u32 selector = (close | (close >> 8)) & 0xffffu;
    const u32 lower = pick_bytes(t0, t1, selector & 0x7777u);
    const u32 upper = pick_bytes(t2, t3, selector & 0x7777u);
    return pick_bytes(lower, upper, 0x3210u | ((selector & 0x8888u) >> 1));
}

// ---- blocks of 32 columns, a slot each

struct Small {
    static constexpr Kind KIND = SMALL;
    static constexpr int BLOCK = 32;
    static constexpr int STEP = CHUNK;
    static constexpr bool MINIMUM = false;
    DEVICE_MEMBER static int low(int slot) { return 32 * slot; }
    DEVICE_MEMBER static int high(int slot) { return 32 * slot + RUN; }
    template <class Raw>
    DEVICE_MEMBER static float scale(const Raw& raw, int row) { return raw.d.of(row); }
    template <class Raw>
    DEVICE_MEMBER static float minimum(const Raw&, int) { return 0.0f; }
};

// A scale and four bits of each column.
struct Nibbles : Small {
    static constexpr int BYTES = 16 * 18;
    struct Raw {
        Halves d;
        uint4 quants[4];
    };
    DEVICE_MEMBER static void load(const u8* at, int, int group, Raw& raw) {
        raw.d.load(at, group);
        load_words(at + 32, group, raw.quants);
    }
};

struct Q4_0 : Nibbles {
    DEVICE_MEMBER static void unpack(const Raw& raw, int, int row, u32 (&words)[8]) {
        nibbles(raw.quants, row, words);
#pragma unroll
        for (int k = 0; k < 8; ++k) words[k] = centred(words[k], 8);
    }
};

struct Q4_1 : Small {
    static constexpr int BYTES = 16 * 20;
    static constexpr bool MINIMUM = true;
    struct Raw {
        Halves d, m;
        uint4 quants[4];
    };
    DEVICE_MEMBER static void load(const u8* at, int, int group, Raw& raw) {
        raw.d.load(at, group);
        raw.m.load(at + 32, group);
        load_words(at + 64, group, raw.quants);
    }
    DEVICE_MEMBER static void unpack(const Raw& raw, int, int row, u32 (&words)[8]) {
        nibbles(raw.quants, row, words);
    }
    DEVICE_MEMBER static float minimum(const Raw& raw, int row) { return raw.m.of(row); }
};

// Adds the fifth bits: byte b, bit c of `fifths` belongs to column 4 c + b (packing._twist).
DEVICE void add_fifths(u32 fifths, u32 (&words)[8]) {
#pragma unroll
    for (int c = 0; c < 8; ++c) words[c] |= ((fifths >> c) & 0x01010101u) << 4;
}

struct Q5_0 : Small {
    static constexpr int BYTES = 16 * 22;
    struct Raw {
        Halves d;
        uint4 fifths, quants[4];
    };
    DEVICE_MEMBER static void load(const u8* at, int, int group, Raw& raw) {
        raw.d.load(at, group);
        raw.fifths = load16(at + 32 + 16 * group);
        load_words(at + 96, group, raw.quants);
    }
    DEVICE_MEMBER static void unpack(const Raw& raw, int, int row, u32 (&words)[8]) {
        nibbles(raw.quants, row, words);
        add_fifths(part(raw.fifths, row), words);
#pragma unroll
        for (int k = 0; k < 8; ++k) words[k] = centred(words[k], 16);
    }
};

struct Q5_1 : Small {
    static constexpr int BYTES = 16 * 24;
    static constexpr bool MINIMUM = true;
    struct Raw {
        Halves d, m;
        uint4 fifths, quants[4];
    };
    DEVICE_MEMBER static void load(const u8* at, int, int group, Raw& raw) {
        raw.d.load(at, group);
        raw.m.load(at + 32, group);
        raw.fifths = load16(at + 64 + 16 * group);
        load_words(at + 128, group, raw.quants);
    }
    DEVICE_MEMBER static void unpack(const Raw& raw, int, int row, u32 (&words)[8]) {
        nibbles(raw.quants, row, words);
        add_fifths(part(raw.fifths, row), words);
    }
    DEVICE_MEMBER static float minimum(const Raw& raw, int row) { return raw.m.of(row); }
};

struct Q8_0 : Small {
    static constexpr int BYTES = 16 * 34;
    struct Raw {
        Halves d;
        uint4 low[4], high[4];
    };
    DEVICE_MEMBER static void load(const u8* at, int, int group, Raw& raw) {
        raw.d.load(at, group);
        load_words(at + 32, group, raw.low);
        load_words(at + 288, group, raw.high);
    }
    DEVICE_MEMBER static void unpack(const Raw& raw, int, int row, u32 (&words)[8]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // stored plus 128
            words[k] = part(raw.low[k], row) ^ 0x80808080u;
            words[4 + k] = part(raw.high[k], row) ^ 0x80808080u;
        }
    }
};

struct IQ4_NL : Nibbles {
    DEVICE_MEMBER static void unpack(const Raw& raw, int, int row, u32 (&words)[8]) {
        nibbles(raw.quants, row, words);
#pragma unroll
        for (int k = 0; k < 8; ++k)  // -127 -104 -83 -65  -49 -35 -22 -10  1 13 25 38  53 69 89 113
            words[k] = look_up(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, words[k]);
    }
};

struct MXFP4 : Small {
    static constexpr int BYTES = 16 * 17;
    struct Raw {
        u32 exponents;
        uint4 quants[4];
    };
    DEVICE_MEMBER static void load(const u8* at, int, int group, Raw& raw) {
        raw.exponents = load4(at + 4 * group);
        load_words(at + 16, group, raw.quants);
    }
    DEVICE_MEMBER static void unpack(const Raw& raw, int, int row, u32 (&words)[8]) {
        nibbles(raw.quants, row, words);
#pragma unroll
        for (int k = 0; k < 8; ++k)  // 0 1 2 3  4 6 8 12  0 -1 -2 -3  -4 -6 -8 -12
            words[k] = look_up(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu, words[k]);
    }
    // Half of 2^(e - 127): the table is doubled. 2^-128 and 2^-127 are subnormal.
    DEVICE_MEMBER static float scale(const Raw& raw, int row) {
        const u32 e = (raw.exponents >> (8 * row)) & 255u;
        return as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
};

// ---- blocks of 256 columns: a chunk; scales and minima are integers

struct Large {
    static constexpr Kind KIND = LARGE;
    static constexpr int BLOCK = 256;
    static constexpr int STEP = CHUNK;
    static constexpr bool MINIMUM = true;
    template <class Raw>
    DEVICE_MEMBER static float d(const Raw& raw, int row) { return raw.d.of(row); }
    template <class Raw>
    DEVICE_MEMBER static float dmin(const Raw& raw, int row) { return raw.dmin.of(row); }
};

// Of q4_k and q5_k: a slot has half of the low and half of the high nibbles of 32 bytes, which are
// sub-blocks 2 p and 2 p + 1 with p = slot / 2.
struct PairOfSubBlocks : Large {
    DEVICE_MEMBER static int low(int slot) { return 64 * (slot >> 1) + RUN * (slot & 1); }
    DEVICE_MEMBER static int high(int slot) { return low(slot) + 32; }
    // Bytes 0 and 1: six bits each of sub-blocks 2 p and 2 p + 1, from the twelve bytes of a row.
    // `own`: the word of scales or of minima, `rest`: bits that sub-blocks 4..7 have elsewhere.
    DEVICE_MEMBER static u32 six_bits(u32 own, u32 rest, int slot) {
        const int shift = 16 * ((slot >> 1) & 1);
        const u32 mine = own >> shift;
        return slot < 4 ? mine & 0x3f3fu : ((rest >> shift) & 0x0f0fu) | ((mine >> 2) & 0x3030u);
    }
    template <class Raw>
    DEVICE_MEMBER static void scales(const Raw& raw, int slot, int row, int& low, int& high) {
        const u32 both = six_bits(part(raw.scales, row), part(raw.rest, row), slot);
        low = static_cast<int>(both & 255u);
        high = static_cast<int>(both >> 8);
    }
    template <class Raw>
    DEVICE_MEMBER static void minima(const Raw& raw, int slot, int row, int& low, int& high) {
        const u32 both = six_bits(part(raw.minima, row), part(raw.rest, row) >> 4, slot);
        low = static_cast<int>(both & 255u);
        high = static_cast<int>(both >> 8);
    }
};

struct Q4_K : PairOfSubBlocks {
    static constexpr int BYTES = 16 * 144;
    struct Raw {
        Halves d, dmin;
        uint4 scales, minima, rest, quants[4];
    };
    DEVICE_MEMBER static void load(const u8* at, int slot, int group, Raw& raw) {
        raw.d.load(at, group);
        raw.dmin.load(at + 32, group);
        raw.scales = load16(at + 64 + 16 * group);
        raw.minima = load16(at + 128 + 16 * group);
        raw.rest = load16(at + 192 + 16 * group);
        load_words(at + 256 + 256 * slot, group, raw.quants);
    }
    DEVICE_MEMBER static void unpack(const Raw& raw, int, int row, u32 (&words)[8]) {
        nibbles(raw.quants, row, words);
    }
};

struct Q5_K : PairOfSubBlocks {
    static constexpr int BYTES = 16 * 176;
    struct Raw {
        Halves d, dmin;
        uint4 scales, minima, rest, fifths[4], quants[4];
    };
    DEVICE_MEMBER static void load(const u8* at, int slot, int group, Raw& raw) {
        raw.d.load(at, group);
        raw.dmin.load(at + 32, group);
        raw.scales = load16(at + 64 + 16 * group);
        raw.minima = load16(at + 128 + 16 * group);
        raw.rest = load16(at + 192 + 16 * group);
        load_words(at + 256 + 256 * (slot & 1), group, raw.fifths);
        load_words(at + 768 + 256 * slot, group, raw.quants);
    }
    DEVICE_MEMBER static void unpack(const Raw& raw, int slot, int row, u32 (&words)[8]) {
        nibbles(raw.quants, row, words);
        const int bit = slot & ~1;  // bit 2 p is the low sub-block's, 2 p + 1 the high one's
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 bits = part(raw.fifths[k], row) >> bit;
            words[k] |= (bits & 0x01010101u) << 4;
            words[4 + k] |= ((bits >> 1) & 0x01010101u) << 4;
        }
    }
};

// Slot = 4 half + 2 quarter + sixteen: of the 128 columns of a half, 16 columns of quarter 0 or 1
// in the low nibbles, and the same of quarter 2 or 3 in the high ones.
struct Q6_K : Large {
    static constexpr int BYTES = 16 * 210;
    static constexpr bool MINIMUM = false;
    struct Raw {
        Halves d;
        uint4 low_scales, high_scales, upper[4], quants[4];
    };
    DEVICE_MEMBER static int low(int slot) { return 128 * (slot >> 2) + RUN * (slot & 3); }
    DEVICE_MEMBER static int high(int slot) { return low(slot) + 64; }
    DEVICE_MEMBER static void load(const u8* at, int slot, int group, Raw& raw) {
        const int half = slot >> 2;
        const u8* bits = at + 288 + 1536 * half;  // 512 bytes of upper bits, then of nibbles
        raw.d.load(at, group);
        raw.low_scales = load16(at + 32 + 128 * half + 16 * group);
        raw.high_scales = load16(at + 96 + 128 * half + 16 * group);
        load_words(bits + 256 * (slot & 1), group, raw.upper);
        load_words(bits + 512 + 256 * (slot & 3), group, raw.quants);
    }
    DEVICE_MEMBER static void unpack(const Raw& raw, int slot, int row, u32 (&words)[8]) {
        nibbles(raw.quants, row, words);
        const int quarter = (slot >> 1) & 1;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 bits = part(raw.upper[k], row) >> (2 * quarter);
            words[k] = centred(words[k] | ((bits & 0x03030303u) << 4), 32);
            words[4 + k] = centred(words[4 + k] | (((bits >> 4) & 0x03030303u) << 4), 32);
        }
    }
    DEVICE_MEMBER static void scales(const Raw& raw, int slot, int row, int& low, int& high) {
        const int shift = 8 * (slot & 3);
        low = static_cast<signed char>(part(raw.low_scales, row) >> shift);
        high = static_cast<signed char>(part(raw.high_scales, row) >> shift);
    }
    DEVICE_MEMBER static void minima(const Raw&, int, int, int& low, int& high) { low = high = 0; }
    DEVICE_MEMBER static float dmin(const Raw&, int) { return 0.0f; }
};

// ---- floats: a chunk is eight slots of four words; a word is one or two columns

struct Plain {
    static constexpr Kind KIND = PLAIN;
    static constexpr bool MINIMUM = false;
};

struct F32 : Plain {
    static constexpr int BLOCK = 1;
    static constexpr int STEP = 32;
    static constexpr int BYTES = 64;
    DEVICE_MEMBER static float value(u32 word, int) { return as_float(word); }
};

struct F16 : Plain {
    static constexpr int BLOCK = 2;
    static constexpr int STEP = 64;
    static constexpr int BYTES = 64;
    DEVICE_MEMBER static float value(u32 word, int column) {
        return half_to_float(column ? word >> 16 : word & 0xffffu);
    }
};

struct BF16 : Plain {
    static constexpr int BLOCK = 2;
    static constexpr int STEP = 64;
    static constexpr int BYTES = 64;
    DEVICE_MEMBER static float value(u32 word, int column) {
        return as_float(column ? word & 0xffff0000u : word << 16);
    }
};

// Where a slot's block lies in a tile.
template <class F>
DEVICE const u8* block_at(const u8* tile, int chunk, int slot) {
    const int block = F::KIND == LARGE ? chunk : 8 * chunk + slot;
    return tile + static_cast<i64>(block) * F::BYTES;
}
