"""C++ source of matrix products and convolutions that become part of compiled graphs."""

SOURCE = r"""
#include <cstring>
#include <vector>
#include <torch/csrc/inductor/cpp_prefix.h>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace equilibria {
using Vector = at::vec::Vectorized<float>;
constexpr long WIDTH = Vector::size();
constexpr int ROWS = WIDTH >= 16 ? 8 : 6;  // accumulators of a tile fit into the registers
constexpr long PARALLEL = 1 << 20;  // multiplications from which threads pay off

inline bool in_parallel(long multiplications) {
#ifdef _OPENMP
  return multiplications >= PARALLEL && omp_get_max_threads() > 1;
#else
  return false;
#endif
}

// ROWS × VECTORS entries of c = Σ_s a_s b_s for segments s of `depth` columns of a.
template <int ROWS, int VECTORS>
inline void tile(
    float* c, long c_stride, const float* a, long a_stride, long segments, long segment_stride,
    long depth, const float* b, long b_stride) {
  Vector sum[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sum[i][j] = Vector(0.0f);
  for (long s = 0; s < segments; ++s) {
    const float* start = a + s * segment_stride;
    for (long k = 0; k < depth; ++k, b += b_stride) {
      Vector row[VECTORS];
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; ++j) row[j] = Vector::loadu(b + j * WIDTH);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const Vector factor(start[i * a_stride + k]);
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; ++j) sum[i][j] = at::vec::fmadd(factor, row[j], sum[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j) sum[i][j].store(c + i * c_stride + j * WIDTH);
}

// All rows of one panel of VECTORS vectors of columns.
template <int VECTORS>
inline void panel(
    long rows, float* c, long c_stride, const float* a, long a_stride, long segments,
    long segment_stride, long depth, const float* b, long b_stride) {
  long i = 0;
  const auto run = [&](auto count) {
    constexpr int n = decltype(count)::value;
    if constexpr (n * VECTORS <= 16)
      for (; i + n <= rows; i += n)
        tile<n, VECTORS>(
            c + i * c_stride, c_stride, a + i * a_stride, a_stride, segments, segment_stride,
            depth, b, b_stride);
  };
  run(std::integral_constant<int, ROWS>());
  run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
}

// All columns, a multiple of WIDTH, for a few rows.
inline void columns(
    long count, long rows, float* c, long c_stride, const float* a, long a_stride, long segments,
    long segment_stride, long depth, const float* b, long b_stride) {
  long n = 0;
  const auto run = [&](auto vectors) {
    constexpr int v = decltype(vectors)::value;
    for (; n + v * WIDTH <= count; n += v * WIDTH)
      panel<v>(
          rows, c + n, c_stride, a, a_stride, segments, segment_stride, depth, b + n, b_stride);
  };
  if (rows == 1) run(std::integral_constant<int, 8>());
  if (rows < ROWS) run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
}

// c = a b for matrices (m, k) and (k, n) without gaps.
inline void product(float* c, const float* a, const float* b, long m, long n, long k) {
  constexpr long block = 8 * ROWS;
#pragma omp parallel for if (in_parallel(m * n * k))
  for (long begin = 0; begin < m; begin += block)
    columns(
        n, std::min(block, m - begin), c + begin * n, n, a + begin * k, k, 1, 0, k, b, n);
}

// Convolution of images (samples, height, width, channels) with a kernel (rows, columns, channels,
// outputs), padded by zeros.
inline void convolution(
    float* out, const float* images, const float* kernel, long samples, long height, long width,
    long channels, long outputs, long rows, long columns_, long top, long left) {
  const long padded_width = width + 2 * left;
  const long padded_size = (height + 2 * top) * padded_width * channels;
  const long out_height = height + 2 * top - rows + 1, out_width = padded_width - columns_ + 1;
  const long work = samples * out_height * out_width * rows * columns_ * channels * outputs;
#pragma omp parallel for if (in_parallel(work))
  for (long sample = 0; sample < samples; ++sample) {
    static thread_local std::vector<float> buffer;
    buffer.assign(padded_size, 0.0f);
    for (long y = 0; y < height; ++y)
      std::memcpy(
          buffer.data() + ((y + top) * padded_width + left) * channels,
          images + (sample * height + y) * width * channels, sizeof(float) * width * channels);
    float* image = out + sample * out_height * out_width * outputs;
    for (long n = 0; n < outputs; n += 2 * WIDTH)
      for (long y = 0; y < out_height; ++y)
        columns(
            std::min(2 * WIDTH, outputs - n), out_width, image + y * out_width * outputs + n,
            outputs, buffer.data() + y * padded_width * channels, channels, rows,
            padded_width * channels, columns_ * channels, kernel + n, outputs);
  }
}
}  // namespace equilibria
"""
