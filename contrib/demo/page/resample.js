// Resize as Pillow does, to the bit: its Resample.c for images of 8 bits. A canvas resizes differently.

const BITS = 22; // of a weight behind the point

const sinc = (x) => (x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI));

// Each filter's reach in pixels, and its weight at a distance.
const FILTERS = {
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, (x) => (Math.abs(x) < 1 ? sinc(x) * (0.54 + 0.46 * Math.cos(x * Math.PI)) : 0)],
  bicubic: [2, (x) => cubic(Math.abs(x))],
  lanczos: [3, (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

function cubic(x) {
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
}

// For each of `count` pixels from `start` on, of a side resized from `before` to `after`: where its window in the
// old side begins, and the window's weights as whole numbers.
function windows(before, after, filter, start, count) {
  const [reach, weight] = FILTERS[filter];
  const scale = before / after;
  const stretch = Math.max(scale, 1);
  const support = reach * stretch;
  return Array.from({ length: count }, (_, index) => {
    const center = (start + index + 0.5) * scale;
    const first = Math.max(0, Math.trunc(center - support + 0.5));
    const end = Math.min(before, Math.trunc(center + support + 0.5));
    const weights = Array.from({ length: end - first }, (_, i) => weight((i + first - center + 0.5) * (1 / stretch)));
    const sum = weights.reduce((a, b) => a + b, 0) || 1;
    return [first, Int32Array.from(weights, (w) => Math.trunc((w / sum) * 2 ** BITS + (w < 0 ? -0.5 : 0.5)))];
  });
}

function nearest(before, after, start, count) {
  const scale = before / after;
  let place = scale * 0.5;
  return Array.from({ length: start + count }, () => {
    const first = Math.floor(place);
    place += scale;
    return [first, Int32Array.of(2 ** BITS)];
  }).slice(start);
}

// Resize lines of pixels: `step` values from pixel to pixel, `stride` from line to line. Each pixel has 4 values.
function pass(from, lines, stride, step, wanted, to, toStride, toStep) {
  for (let line = 0; line < lines; line++) {
    for (let place = 0; place < wanted.length; place++) {
      const [first, weights] = wanted[place];
      const source = line * stride + first * step;
      const target = line * toStride + place * toStep;
      for (let channel = 0; channel < 3; channel++) {
        let sum = 1 << (BITS - 1);
        for (let i = 0; i < weights.length; i++) {
          sum += from[source + i * step + channel] * weights[i];
        }
        to[target + channel] = Math.min(255, Math.max(0, sum >> BITS));
      }
      to[target + 3] = 255;
    }
  }
}

// An image of width × height in RGBA, of which the alpha is left out, resized to `size` = [width, height]. Only the
// `box` = [left, top, width, height] of the result is made.
export function resize(pixels, width, height, size, filter, box) {
  const [left, top, boxWidth, boxHeight] = box ?? [0, 0, ...size];
  const of = filter === "nearest" ? nearest : (...sides) => windows(sides[0], sides[1], filter, sides[2], sides[3]);
  let current = pixels;
  let across = width;
  if (width !== size[0] || boxWidth !== width) {
    const next = new Uint8ClampedArray(boxWidth * height * 4);
    const wanted = width === size[0] ? copied(left, boxWidth) : of(width, size[0], left, boxWidth);
    pass(current, height, width * 4, 4, wanted, next, boxWidth * 4, 4);
    [current, across] = [next, boxWidth];
  }
  const result = new Uint8ClampedArray(across * boxHeight * 4);
  const wanted = height === size[1] ? copied(top, boxHeight) : of(height, size[1], top, boxHeight);
  pass(current, across, 4, across * 4, wanted, result, 4, across * 4);
  return result;
}

const copied = (start, count) => Array.from({ length: count }, (_, i) => [start + i, Int32Array.of(2 ** BITS)]);

// To the nearest whole number, a half to the even one, as Python rounds.
function round(x) {
  const below = Math.floor(x);
  return x - below === 0.5 ? below + (below % 2) : Math.round(x);
}

// Where the evaluation transform resizes an image to, and which box of that it keeps. The box of a padded image begins
// before it.
export function geometry(width, height, how) {
  const whole = Math.floor(how.img_size / how.crop_pct);
  const sides = {
    crop: (side) => Math.trunc((whole * side) / Math.min(width, height)),
    pad: (side) => Math.max(1, round(side / (Math.max(width, height) / whole))),
    squash: () => whole,
  };
  const size = [width, height].map(sides[how.fit]);
  const [left, top] = size.map((side) =>
    side < how.img_size ? -Math.floor((how.img_size - side) / 2) : round((side - how.img_size) / 2),
  );
  return { size, box: [left, top, how.img_size, how.img_size] };
}

// The color around a padded image, red, green and blue to 255, of a mean for each channel or for gray.
export function padding(mean) {
  return [0, 1, 2].map((channel) => 255 * mean[channel % mean.length]);
}

// The box of an image of which `resize` makes what lies in it; around that the color of `how.mean`.
function framed(pixels, width, height, how) {
  const { size, box } = geometry(width, height, how);
  const [left, top] = box.map((start) => Math.max(0, start));
  const [across, down] = size.map((side) => Math.min(side, how.img_size));
  const inner = resize(pixels, width, height, size, how.interpolation, [left, top, across, down]);
  if (across === how.img_size && down === how.img_size) return inner;
  const color = [...padding(how.mean).map(round), 255];
  const result = Uint8ClampedArray.from({ length: how.img_size ** 2 * 4 }, (_, i) => color[i % 4]);
  for (let row = 0; row < down; row++) {
    const line = inner.subarray(row * across * 4, (row + 1) * across * 4);
    result.set(line, ((row + top - box[1]) * how.img_size + left - box[0]) * 4);
  }
  return result;
}

// Halve an image in RGBA as Pillow's reduce(2) does; at an odd side the last pixels stand for fewer.
function halve(pixels, width, height) {
  const [across, down] = [Math.ceil(width / 2), Math.ceil(height / 2)];
  const result = new Uint8ClampedArray(across * down * 4).fill(255);
  for (let y = 0; y < down; y++) {
    const below = 2 * y + 1 < height ? width * 4 : 0;
    for (let x = 0; x < across; x++) {
      const right = 2 * x + 1 < width ? 4 : 0;
      const from = (2 * y * width + 2 * x) * 4;
      for (let i = from; i < from + 3; i++) {
        // A pixel that stands for the one missing beside it changes neither the mean nor its rounding.
        const sum = pixels[i] + pixels[i + right] + pixels[i + below] + pixels[i + right + below];
        result[(y * across + x) * 4 + i - from] = (sum + 2) >> 2;
      }
    }
  }
  return result;
}

// Halve an image for as long as its shorter side keeps `shrink` pixels.
export function shrunk(pixels, width, height, shrink) {
  while (shrink && Math.min(width, height) >= 2 * shrink) {
    pixels = halve(pixels, width, height);
    [width, height] = [Math.ceil(width / 2), Math.ceil(height / 2)];
  }
  return { pixels, width, height };
}

// Make an image in RGBA gray, as Pillow's mode L.
function gray(pixels) {
  const result = new Uint8ClampedArray(pixels.length).fill(255);
  for (let i = 0; i < pixels.length; i += 4) {
    result.fill((19595 * pixels[i] + 38470 * pixels[i + 1] + 7471 * pixels[i + 2] + 0x8000) >> 16, i, i + 3);
  }
  return result;
}

// The evaluation transform: an image in RGBA to the network's input, float32 [C, S, S], and to the pixels of it.
export function prepare(rgba, columns, rows, how) {
  const { pixels: colored, width, height } = shrunk(rgba, columns, rows, how.shrink);
  const pixels = how.in_chans === 1 ? gray(colored) : colored;
  const seen = framed(pixels, width, height, how);
  const count = how.img_size ** 2;
  const input = new Float32Array(how.in_chans * count);
  for (let channel = 0; channel < how.in_chans; channel++) {
    for (let i = 0; i < count; i++) {
      input[channel * count + i] = (seen[4 * i + channel] / 255 - how.mean[channel]) / how.std[channel];
    }
  }
  return { input, seen };
}

// Values [side × side], from 0 for the least to 1 for the largest, resized to [size × size] with a bicubic filter.
export function saliency(values, side, size) {
  const least = Math.min(...values);
  const range = Math.max(...values) - least || 1;
  const at = (row, column) => (values[clamp(row, side) * side + clamp(column, side)] - least) / range;
  const places = Array.from({ length: size }, (_, i) => {
    const place = ((i + 0.5) * side) / size - 0.5;
    const first = Math.floor(place);
    return [first, [-1, 0, 1, 2].map((offset) => sharp(Math.abs(place - first - offset)))];
  });
  const rows = places.map(([first, weights]) =>
    Array.from({ length: side }, (_, column) => weights.reduce((sum, w, i) => sum + w * at(first - 1 + i, column), 0)),
  );
  const resized = new Float32Array(size * size);
  rows.forEach((row, y) =>
    places.forEach(([first, weights], x) => {
      const value = weights.reduce((sum, w, i) => sum + w * row[clamp(first - 1 + i, side)], 0);
      resized[y * size + x] = Math.min(1, Math.max(0, value));
    }),
  );
  return resized;
}

const clamp = (i, side) => Math.min(side - 1, Math.max(0, i));

// torch's bicubic filter, which is sharper than Pillow's.
function sharp(x) {
  if (x <= 1) return (1.25 * x - 2.25) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.75 : 0;
}
