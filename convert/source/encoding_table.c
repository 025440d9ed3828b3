/* The encodings of source weights: one row each, after the published checkpoints and the libraries that write them. */
#include "convert/source/encoding.h"

#define BIT(t)   (1u << (t))
#define FLOAT    (BIT(MM_F32) | BIT(MM_BF16) | BIT(MM_F16))
#define EXPONENT (BIT(MM_F8_E8M0) | BIT(MM_U8))
#define E2M1     (BIT(MM_U8) | BIT(MM_F4))

/* Codes: bytes, pairs of columns in a byte. */
#define FP8 \
  { .suffix = "weight", .cell = {1, 1}, .dtypes = BIT(MM_F8_E4M3) }
#define PAIRS(s, t) \
  { .suffix = s, .cell = {1, 2}, .dtypes = t }
/* Scales. */
#define GRID(s, t, ...) \
  { .suffix = s, .cell = {__VA_ARGS__}, .dtypes = t }
#define TURNED(s, t, ...) \
  { .suffix = s, .cell = {__VA_ARGS__}, .dtypes = t, .span = MM_SPAN_TURNED }
#define PER_ROW \
  { .suffix = "weight_scale", .cell = {1, 0}, .dtypes = FLOAT, .span = MM_SPAN_ROWS }
#define ONE(s, t) \
  { .suffix = s, .dtypes = t, .span = MM_SPAN_ONE }
#define SMOOTH \
  { .suffix = "pre_quant_scale", .dtypes = FLOAT, .span = MM_SPAN_COLS, .cell = {0, 1}, .optional = true }
#define G_IDX(s) \
  { .suffix = s, .dtypes = BIT(MM_I32), .span = MM_SPAN_COLS, .cell = {0, 1}, .optional = true }
#define INPUT(s) \
  { .suffix = s, .dtypes = FLOAT, .span = MM_SPAN_ONE, .optional = true }

/* Where AWQ's words hold columns 0 … 7: its nibbles are columns 0, 2, 4, 6, 1, 3, 5, 7. */
static const uint8_t awq_order[8] = {0, 4, 1, 5, 2, 6, 3, 7};

/* compressed-tensors' pack-quantized: words of 32 / bits columns, offset binary; zero points packed along rows. */
#define PACKED(title, per)                                                                                                         \
  .name = title, .codes = GRID("weight_packed", BIT(MM_I32), 1, per), .signed_scale = true,                                        \
  .part = {[MM_SCALE] = GRID("weight_scale", FLOAT, 1, MM_CELL_GROUP),                                                             \
           [MM_ZERO] = {.suffix = "weight_zero_point", .dtypes = BIT(MM_I32), .cell = {per, MM_CELL_GROUP}, .optional = true},     \
           [MM_ORDER] = G_IDX("weight_g_idx"),                                                                                     \
           [MM_INPUT] = INPUT("input_scale"),                                                                                      \
           [MM_SIDES] = {.suffix = "weight_shape", .dtypes = BIT(MM_I64) | BIT(MM_I32), .span = MM_SPAN_SIDES, .optional = true}}, \
  .unread = {"input_zero_point"}
/* GPTQ: the same words along the columns of a matrix that lies on its side. */
#define GPTQ(title, per)                                                                              \
  .name = title, .codes = TURNED("qweight", BIT(MM_I32), 1, per), .signed_scale = true, .less = true, \
  .part = {[MM_SCALE] = TURNED("scales", FLOAT, 1, MM_CELL_GROUP),                                    \
           [MM_ZERO] = TURNED("qzeros", BIT(MM_I32), per, MM_CELL_GROUP),                             \
           [MM_ORDER] = G_IDX("g_idx")}

#define ENCODING(title, how, what, ...) \
  { .name = title, .code = how, .codes = what, __VA_ARGS__ }
const mm_encoding mm_encodings[] = {
    {.name = "unquantised", .code = MM_CODE_PLAIN, .codes = GRID("weight", FLOAT, 1, 1)},
    /* Before block FP8: exponents of 1 x 32 are its own, also where the configuration calls that a block. */
    ENCODING("MXFP8", MM_CODE_E4M3, FP8, .part = {[MM_SCALE] = GRID("weight_scale_inv", EXPONENT, 1, 32)}, .scheme = "mxfp8"),
    ENCODING("block FP8", MM_CODE_E4M3, FP8,
             .part = {[MM_SCALE] = GRID("weight_scale_inv", BIT(MM_F32) | BIT(MM_BF16) | EXPONENT, MM_CELL_BLOCK, MM_CELL_BLOCK)},
             .scheme = "block_fp8"),
    ENCODING("SGLang W4AFP8", MM_CODE_INT4, PAIRS("weight", BIT(MM_I8) | BIT(MM_U8)),
             .part = {[MM_SCALE] = GRID("weight_scale_inv", BIT(MM_F32) | BIT(MM_BF16), 1, 128), [MM_INPUT] = INPUT("input_scale")},
             .signed_scale = true, .scheme = "w4afp8"),
    ENCODING("tensor-wise FP8", MM_CODE_E4M3, FP8, .part = {[MM_SCALE] = ONE("weight_scale", FLOAT), [MM_INPUT] = INPUT("input_scale")},
             .scheme = "tensor_wise_fp8"),
    ENCODING("tensor-wise FP8 of transformers", MM_CODE_E4M3, FP8,
             .part = {[MM_SCALE] = ONE("weight_scale_inv", FLOAT), [MM_INPUT] = INPUT("activation_scale")}, .whole = true,
             .scheme = "tensor_wise_fp8"),
    ENCODING("per-channel FP8", MM_CODE_E4M3, FP8, .part = {[MM_SCALE] = PER_ROW, [MM_INPUT] = INPUT("input_scale")},
             .unread = {"input_scale_ub", "activation_scale_ub"}, .scheme = "channel_fp8"),
    ENCODING("compressed-tensors block FP8", MM_CODE_E4M3, FP8,
             .part = {[MM_SCALE] = GRID("weight_scale", BIT(MM_F32) | BIT(MM_BF16), MM_CELL_BLOCK, MM_CELL_BLOCK)}, .scheme = "block_fp8"),
    ENCODING("ModelOpt FP8_PB_WO", MM_CODE_E4M3, FP8,
             .part = {[MM_SCALE] = {.suffix = "weight_scale",
                                    .dtypes = BIT(MM_F32) | BIT(MM_BF16),
                                    .span = MM_SPAN_SPREAD,
                                    .cell = {MM_CELL_BLOCK, MM_CELL_BLOCK}}},
             .scheme = "block_fp8"),
    ENCODING("MXFP8", MM_CODE_E4M3, FP8, .part = {[MM_SCALE] = GRID("weight_scale", EXPONENT, 1, 32)}, .scheme = "mxfp8"),
    ENCODING("ModelOpt NVFP4", MM_CODE_E2M1, PAIRS("weight", E2M1),
             .part = {[MM_SCALE] = GRID("weight_scale", BIT(MM_F8_E4M3), 1, 16),
                      [MM_GLOBAL] = ONE("weight_scale_2", BIT(MM_F32)),
                      [MM_SMOOTH] = SMOOTH,
                      [MM_INPUT] = INPUT("input_scale")},
             .scheme = "nvfp4"),
    ENCODING("compressed-tensors NVFP4", MM_CODE_E2M1, PAIRS("weight_packed", E2M1),
             .part = {[MM_SCALE] = GRID("weight_scale", BIT(MM_F8_E4M3), 1, 16),
                      [MM_GLOBAL] = ONE("weight_global_scale", BIT(MM_F32)),
                      [MM_INPUT] = INPUT("input_global_scale")},
             .reciprocal = true, .scheme = "nvfp4"),
    ENCODING("MXFP4", MM_CODE_E2M1, PAIRS("weight", E2M1), .part = {[MM_SCALE] = GRID("weight_scale", EXPONENT, 1, 32)}, .scheme = "mxfp4"),
    ENCODING("compressed-tensors MXFP4", MM_CODE_E2M1, PAIRS("weight_packed", E2M1),
             .part = {[MM_SCALE] = GRID("weight_scale", EXPONENT, 1, 32)}, .scheme = "mxfp4"),
    {PACKED("compressed-tensors int4", 8), .code = MM_CODE_INT4_OFFSET, .scheme = "w4a16"},
    {PACKED("compressed-tensors packed int8", 4), .code = MM_CODE_INT8, .flip = 0x80, .scheme = "int8"},
    ENCODING("ModelOpt int4", MM_CODE_INT4, GRID("weight", BIT(MM_U8), 2, 1),
             .part = {[MM_SCALE] = GRID("weight_scale", FLOAT, 1, MM_CELL_GROUP), [MM_SMOOTH] = SMOOTH, [MM_INPUT] = INPUT("input_scale")},
             .unread = {"weight_scale_2"}), /* W4A8's second scale is for its FP8 products */
    ENCODING("per-channel int8", MM_CODE_INT8, GRID("weight", BIT(MM_I8), 1, 1),
             .part = {[MM_SCALE] = PER_ROW, [MM_SMOOTH] = SMOOTH, [MM_INPUT] = INPUT("input_scale")}, .signed_scale = true,
             .unread = {"input_zero_point"}, .scheme = "int8"),
    ENCODING("int8 in groups", MM_CODE_INT8, GRID("weight", BIT(MM_I8), 1, 1),
             .part = {[MM_SCALE] = GRID("weight_scale", FLOAT, 1, MM_CELL_GROUP), [MM_INPUT] = INPUT("input_scale")}, .signed_scale = true,
             .unread = {"input_zero_point"}, .scheme = "int8"),
    ENCODING("tensor-wise int8", MM_CODE_INT8, GRID("weight", BIT(MM_I8), 1, 1),
             .part = {[MM_SCALE] = ONE("weight_scale", FLOAT), [MM_INPUT] = INPUT("input_scale")}, .signed_scale = true,
             .unread = {"input_zero_point"}, .scheme = "int8"),
    ENCODING("AWQ", MM_CODE_INT4_OFFSET, TURNED("qweight", BIT(MM_I32), 8, 1),
             .part = {[MM_SCALE] = TURNED("scales", FLOAT, 1, MM_CELL_GROUP), [MM_ZERO] = TURNED("qzeros", BIT(MM_I32), 8, MM_CELL_GROUP)},
             .signed_scale = true, .order = awq_order),
    {GPTQ("GPTQ int4", 8), .code = MM_CODE_INT4_OFFSET},
    {GPTQ("GPTQ int8", 4), .code = MM_CODE_INT8, .flip = 0x80},
    {0},
};

const mm_refused_suffix mm_refused_suffixes[] = {
    {"quant_weight", "E_Q_METHOD", "FastDeploy's quant_weight, which does not say whether its rows are permuted or rotated"},
    {"weight_offset", "E_Q_METHOD", "ModelSlim's weight_offset"},
    {"blocks", "E_Q_METHOD", "gpt-oss's blocks, whose gate and up rows may be interleaved"},
    {"w_bf16_to_fp8_scale", "E_Q_METHOD", "the second scale of auto-round's W4A8"},
    {"svdquant_lora_a", "E_Q_TRANSFORM", "SVDQuant's low-rank part"},
    {"svdquant_lora_b", "E_Q_TRANSFORM", "SVDQuant's low-rank part"},
    {NULL, NULL, NULL},
};
