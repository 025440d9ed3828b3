/* formats/hash: SHA-256 against the FIPS 180-4 examples, the block tree against values from another implementation. */
#include "formats/hash.h"

#include <stdlib.h>
#include <string.h>

#include "tests/unit/unit.h"

static void assert_hex(const mm_digest *d, const char *hex) { assert_string_equal(mm_digest_hex(d).text, hex); }

TEST(test_fips_vectors) {
  static const char *const cases[][2] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
       "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
  };
  mm_digest d;
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    d = mm_sha256(cases[i][0], strlen(cases[i][0]));
    assert_hex(&d, cases[i][1]);
  }
  mm_sha256_state s; /* a million times "a", in uneven pieces */
  mm_sha256_begin(&s);
  char a[997];
  memset(a, 'a', sizeof a);
  for (size_t left = 1000000, step = 1; left > 0; step = step * 7 % 997 + 1) {
    size_t n = step < left ? step : left;
    mm_sha256_add(&s, a, n);
    left -= n;
  }
  d = mm_sha256_end(&s);
  assert_hex(&d, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* Streaming digest of data[0, n) in chunks that never fit a block. */
static mm_digest streamed(const uint8_t *data, size_t n) {
  mm_sha256_state s;
  mm_sha256_begin(&s);
  for (size_t at = 0, step = 1; at < n; step = step * 5 % 131071 + 3) {
    size_t take = step < n - at ? step : n - at;
    mm_sha256_add(&s, data + at, take);
    at += take;
  }
  return mm_sha256_end(&s);
}

/* 9 MiB + 13 bytes; the expected digests were computed by Python's hashlib over the same formula. */
TEST(test_block_tree) {
  static const char *const block_hex[] = {
      "d5b8acb9a1a41317d04a2fc14810a2370c529d56b11897093daa9e1942449ae9",
      "0d06f38c53f55cb8ac6b2a1932f3d8945052b6e7e3a349baa7e88f9d2fa0f152",
      "4490669fde38a3083aaea7cd94a01df87e2103c236647a3c6a097e382bc78289",
  };
  const size_t n = ((size_t)9 << 20) + 13;
  uint8_t *data = malloc(n);
  assert_non_null(data);
  for (size_t i = 0; i < n; i++) data[i] = (uint8_t)((uint32_t)i * UINT32_C(2654435761) >> 13 ^ i >> 20);
  mm_digest block[3];
  assert_int_equal(mm_hash_blocks(n), 3);
  for (size_t b = 0; b < 3; b++) {
    size_t from = b * MM_HASH_BLOCK, len = (size_t)mm_min(MM_HASH_BLOCK, n - from);
    block[b] = mm_sha256(data + from, len);
    assert_hex(&block[b], block_hex[b]);
    mm_digest again = streamed(data + from, len);
    assert_true(mm_digest_equal(&again, &block[b]));
  }
  mm_digest root = mm_hash_root(block, 3);
  assert_hex(&root, "44e2c3d29896bf8a28b833ad72e1faea7f132b7343121e67ea7ca699e12dcf38");
  mm_digest whole = streamed(data, n);
  assert_hex(&whole, "54053cb2837ed5f5ec7f2c47d67baa4dcce3c14b43dc7b3a83967d0f0d5fe487");
  free(data);
}

TEST(test_block_counts) {
  assert_int_equal(mm_hash_blocks(0), 0);
  assert_int_equal(mm_hash_blocks(1), 1);
  assert_int_equal(mm_hash_blocks(UINT64_C(4194304)), 1);
  assert_int_equal(mm_hash_blocks(UINT64_C(4194305)), 2);
  mm_digest root = mm_hash_root(NULL, 0);
  assert_hex(&root, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(test_hex) {
  static const char good[] = "00ff10a5b6c7d8e9f0123456789abcdef0f1f2f3f4f5f6f7f8f9fafbfcfdfe01";
  mm_digest d, e;
  assert_true(mm_digest_parse(good, 64, &d));
  assert_int_equal(d.byte[1], 0xFF);
  assert_int_equal(d.byte[3], 0xA5);
  assert_int_equal(d.byte[31], 0x01);
  assert_hex(&d, good);
  for (size_t i = 0; i < 32; i++) { /* every byte counts */
    e = d;
    e.byte[i] ^= 0x10;
    assert_false(mm_digest_equal(&d, &e));
  }
  for (size_t i = 0; i < 64; i++) {
    static const char wrong[] = {'A', 'g', '/', ':', '`', 0, ' ', (char)0xB0};
    char text[65];
    memcpy(text, good, 65);
    text[i] = wrong[i % sizeof wrong];
    assert_false(mm_digest_parse(text, 64, &e));
  }
  assert_false(mm_digest_parse(good, 63, &e));
  assert_false(mm_digest_parse(good, 65, &e));
  assert_false(mm_digest_parse("", 0, &e));
}

/* Every byte at every place of a digest's digits. */
TEST(test_every_digit) {
  static const char digit[] = "0123456789abcdef";
  mm_digest want, d;
  for (size_t i = 0; i < sizeof want.byte; i++) want.byte[i] = (uint8_t)(i * 37 + 11);
  for (size_t at = 0; at < MM_HEX_LEN; at++) {
    for (int c = 0; c < 256; c++) {
      const char *value = c ? strchr(digit, c) : NULL;
      mm_hex hex = mm_digest_hex(&want);
      hex.text[at] = (char)c;
      assert_int_equal(mm_digest_parse(hex.text, MM_HEX_LEN, &d), value != NULL);
      mm_digest other = want;
      uint8_t *b = &other.byte[at / 2];
      if (value) *b = (uint8_t)(at % 2 ? (*b & 0xF0) | (value - digit) : (*b & 0x0F) | (value - digit) << 4);
      if (value) assert_memory_equal(&d, &other, sizeof d);
    }
  }
  assert_false(mm_digest_parse(mm_digest_hex(&want).text, MM_HEX_LEN - 1, &d));
}

int main(void) { return run_unit_tests(NULL, NULL); }
