#include "journal/checksum.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace penstock::journal {
namespace {

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables(std::uint32_t polynomial) {
    Tables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ polynomial : crc >> 1;
        tables[0][byte] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::size_t byte = 0; byte < 256; ++byte)
            tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 255];
    return tables;
}

constexpr Tables castagnoli = make_tables(0x82f63b78);
constexpr Tables ethernet = make_tables(0xedb88320);

std::uint32_t sliced(const Tables &tables, std::uint32_t crc, const void *data, std::size_t bytes) {
    auto *at = static_cast<const std::uint8_t *>(data);
    crc = ~crc;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, at, 8);
        word ^= crc;
        crc = tables[7][word & 255] ^ tables[6][word >> 8 & 255] ^ tables[5][word >> 16 & 255] ^
              tables[4][word >> 24 & 255] ^ tables[3][word >> 32 & 255] ^ tables[2][word >> 40 & 255] ^
              tables[1][word >> 48 & 255] ^ tables[0][word >> 56];
    }
    for (; bytes; ++at, --bytes) crc = crc >> 8 ^ tables[0][(crc ^ *at) & 255];
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_hardware(std::uint32_t crc, const void *data, std::size_t bytes) {
    auto *at = static_cast<const std::uint8_t *>(data);
    std::uint64_t state = static_cast<std::uint32_t>(~crc);
    for (; bytes >= 8; at += 8, bytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, at, 8);
        state = _mm_crc32_u64(state, word);
    }
    auto narrow = static_cast<std::uint32_t>(state);
    for (; bytes; ++at, --bytes) narrow = _mm_crc32_u8(narrow, *at);
    return ~narrow;
}
bool has_hardware() { return __builtin_cpu_supports("sse4.2"); }
bool has_multiply() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2"); }

__attribute__((target("pclmul,sse4.2"))) __m128i fold(__m128i state, __m128i constants, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(state, constants, 0x00), high = _mm_clmulepi64_si128(state, constants, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// CRC-32 by carry-less multiplication: four lanes of 128 bits folded forward, then into one, then reduced (Gopal and
// others, "Fast CRC Computation for Generic Polynomials"). At least 64 bytes, a multiple of 16; the state is inverted.
__attribute__((target("pclmul,sse4.2"))) std::uint32_t crc32_multiply(std::uint32_t crc, const std::uint8_t *at,
                                                                      std::size_t bytes) {
    auto load = [](const std::uint8_t *from) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)); };
    const __m128i by_four = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_one = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641), mask = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i a = _mm_xor_si128(load(at), _mm_cvtsi32_si128(static_cast<int>(crc)));
    __m128i b = load(at + 16), c = load(at + 32), d = load(at + 48);
    for (at += 64, bytes -= 64; bytes >= 64; at += 64, bytes -= 64) {
        a = fold(a, by_four, load(at));
        b = fold(b, by_four, load(at + 16));
        c = fold(c, by_four, load(at + 32));
        d = fold(d, by_four, load(at + 48));
    }
    a = fold(fold(fold(a, by_one, b), by_one, c), by_one, d);
    for (; bytes >= 16; at += 16, bytes -= 16) a = fold(a, by_one, load(at));
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_one, 0x10));
    __m128i rest = _mm_srli_si128(a, 4);
    a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, mask), _mm_set_epi64x(0, 0x0163cd6124), 0x00), rest);
    __m128i quotient = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, mask), polynomial, 0x10), mask);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(quotient, polynomial, 0x00));
    return static_cast<std::uint32_t>(_mm_extract_epi32(a, 1));
}
#elif defined(__aarch64__)
__attribute__((target("arch=armv8-a+crc"))) std::uint32_t crc32c_hardware(std::uint32_t crc, const void *data,
                                                                          std::size_t bytes) {
    auto *at = static_cast<const std::uint8_t *>(data);
    crc = ~crc;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, at, 8);
        crc = __builtin_aarch64_crc32cx(crc, word);
    }
    for (; bytes; ++at, --bytes) crc = __builtin_aarch64_crc32cb(crc, *at);
    return ~crc;
}
bool has_hardware() { return getauxval(AT_HWCAP) & (1 << 7); }  // HWCAP_CRC32
bool has_multiply() { return false; }
std::uint32_t crc32_multiply(std::uint32_t crc, const std::uint8_t *, std::size_t) { return crc; }
#else
bool has_multiply() { return false; }
std::uint32_t crc32_multiply(std::uint32_t crc, const std::uint8_t *, std::size_t) { return crc; }
std::uint32_t crc32c_hardware(std::uint32_t crc, const void *data, std::size_t bytes) {
    return crc32c_table(crc, data, bytes);
}
bool has_hardware() { return false; }
#endif

// a * b modulo the polynomial; bit 31 is the coefficient of 1.
constexpr std::uint32_t multiply_modulo(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (; a; a <<= 1) {
        if (a >> 31) product ^= b;
        b = b & 1 ? b >> 1 ^ 0x82f63b78 : b >> 1;
    }
    return product;
}

// x to the power of 8, 16, 32 ...: what 1, 2, 4 ... bytes shift by.
constexpr std::array<std::uint32_t, 48> make_powers() {
    std::array<std::uint32_t, 48> powers{1u << 23};
    for (std::size_t k = 1; k < powers.size(); ++k) powers[k] = multiply_modulo(powers[k - 1], powers[k - 1]);
    return powers;
}
constexpr std::array<std::uint32_t, 48> byte_powers = make_powers();

const bool hardware = has_hardware();
const bool multiply = has_multiply();

}  // namespace

std::uint32_t crc32c_table(std::uint32_t crc, const void *data, std::size_t bytes) {
    return sliced(castagnoli, crc, data, bytes);
}

std::uint32_t crc32c(std::uint32_t crc, const void *data, std::size_t bytes) {
    return hardware ? crc32c_hardware(crc, data, bytes) : crc32c_table(crc, data, bytes);
}

std::uint32_t crc32c_shift(std::uint32_t crc, std::uint64_t bytes) {
    for (std::size_t k = 0; bytes; ++k, bytes >>= 1)
        if (bytes & 1) crc = multiply_modulo(crc, byte_powers[k]);
    return crc;
}

std::uint32_t crc32(std::uint32_t crc, const void *data, std::size_t bytes) {
    auto *at = static_cast<const std::uint8_t *>(data);
    if (multiply && bytes >= 64) {
        std::size_t whole = bytes & ~std::size_t{15};
        crc = ~crc32_multiply(~crc, at, whole);
        at += whole;
        bytes -= whole;
    }
    return sliced(ethernet, crc, at, bytes);
}

}  // namespace penstock::journal
