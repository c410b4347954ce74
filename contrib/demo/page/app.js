import * as ort from "./ort.wasm.bundle.min.mjs";
import { geometry, padding, prepare, saliency } from "./resample.js";

const SIDE = 448; // of the canvases
const INFERNO = [
  [0, 0, 4], [31, 12, 72], [85, 15, 109], [136, 34, 106], [186, 54, 85], [227, 89, 51], [249, 140, 10], [249, 201, 50],
  [252, 255, 164],
];
const $ = (id) => document.getElementById(id);
const fresh = { cache: "no-cache" }; // a demo that was written anew has the same names

let session, model;
let queue = Promise.resolve();

async function start() {
  model = await (await fetch("model.json", fresh)).json();
  document.title = $("title").textContent = model.title;
  listClasses();
  for (const [name, value] of model.facts) $("facts").append(element("dt", name), element("dd", value));
  say(`Loading the network, ${(model.bytes / 1e6).toFixed(0) || 1} MB …`);
  ort.env.wasm.wasmPaths = { wasm: new URL("ort-wasm-simd-threaded.wasm", import.meta.url).href };
  ort.env.wasm.numThreads = 1; // more need headers that a plain file server does not send
  const weights = await (await fetch("model.onnx", fresh)).arrayBuffer();
  session = await ort.InferenceSession.create(weights, { executionProviders: ["wasm"] });
  for (const input of [$("file"), $("camera")]) {
    input.disabled = false;
    input.addEventListener("change", () => take(input.files, () => (input.value = "")));
  }
  for (const sample of model.samples) offer(sample);
  say("Ready.");
}

// A button with an image that came with the page.
function offer({ file, name }) {
  const button = element("button");
  const image = element("img");
  Object.assign(button, { type: "button", title: name });
  Object.assign(image, { src: file, alt: `Try an image of the class ${name}` });
  image.className = model.preprocessing.img_size < 64 ? "coarse" : "";
  button.append(image);
  button.addEventListener("click", async () => {
    try {
      const content = await fetch(file, fresh);
      if (!content.ok) throw new Error(`${file} is missing beside this page.`);
      take([new File([await content.blob()], `True class ${name}`, { type: "image/png" })]);
    } catch (error) {
      fail(error);
    }
  });
  $("sample-list").append(button);
  $("samples").hidden = false;
}

function element(tag, text, name) {
  const made = document.createElement(tag);
  made.textContent = text ?? "";
  if (name) made.className = name;
  return made;
}

function say(text) {
  $("status").textContent = text;
}

// Show an error, and nothing of an earlier image beside it.
function fail(error) {
  clear();
  $("error").textContent = error.message ?? String(error);
  $("error").hidden = false;
}

function clear() {
  for (const id of ["photo", "map", "switch"]) $(id).hidden = true;
  $("hint").hidden = false;
  $("frame").classList.remove("filled");
  $("best").replaceChildren();
  $("seen").textContent = "";
  say("");
}

function listClasses() {
  $("count").textContent = model.class_names.length.toLocaleString("en");
  const items = model.class_names.map((name) => element("li", name));
  $("classes").append(...items);
  $("search").addEventListener("input", () => {
    const wanted = $("search").value.trim().toLowerCase();
    let found = 0;
    for (const item of items) found += !(item.hidden = !item.textContent.toLowerCase().includes(wanted));
    $("count").textContent = wanted ? `${found} of ${items.length}` : items.length.toLocaleString("en");
  });
}

// Classify the first of the files, after those that were taken before.
function take(files, done = () => {}) {
  const file = [...(files ?? [])].find((one) => one.type.startsWith("image/")) ?? files?.[0];
  if (!file || !session) return;
  queue = queue.then(() => classify(file)).catch(fail).finally(done);
}

async function classify(file) {
  $("error").hidden = true;
  document.body.removeAttribute("data-done");
  say(`Looking at ${file.name || "the image"} …`);
  const bitmap = await decode(file);
  const { width, height } = bitmap;
  await new Promise((then) => setTimeout(then)); // let the page draw that
  const since = performance.now();
  const { input } = prepare(pixels(bitmap), width, height, model.preprocessing);
  const { img_size: size, in_chans: channels } = model.preprocessing;
  const outputs = await session.run({ images: new ort.Tensor("float32", input, [1, channels, size, size]) });
  const time = performance.now() - since;
  show(bitmap, outputs.saliency?.data);
  rank(model.multi_label ? Array.from(outputs.logits.data, sigmoid) : softmax(outputs.logits.data));
  say(`${file.name || "The image"}, ${width} × ${height} pixels, in ${time.toFixed(0)} ms`);
  document.body.dataset.done = file.name;
  bitmap.close();
}

async function decode(file) {
  const upright = model.preprocessing.exif_orientation;
  try {
    return await createImageBitmap(upright ? file : await withoutExif(file), { colorSpaceConversion: "none" });
  } catch {
    throw new Error(`${file.name || "That"} is not an image that this browser can read.`);
  }
}

// A JPEG file without the segments that may turn it; the run ignores them too.
async function withoutExif(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (bytes[0] !== 0xff || bytes[1] !== 0xd8) return file;
  const parts = [bytes.subarray(0, 2)];
  let place = 2;
  while (bytes[place] === 0xff && bytes[place + 1] !== 0xda && place + 4 <= bytes.length) {
    const end = place + 2 + bytes[place + 2] * 256 + bytes[place + 3];
    if (bytes[place + 1] !== 0xe1) parts.push(bytes.subarray(place, end));
    place = end;
  }
  return new Blob([...parts, bytes.subarray(place)], { type: "image/jpeg" });
}

// RGBA, with the background behind transparent pixels.
function pixels(bitmap) {
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  if (model.preprocessing.background) {
    context.fillStyle = model.preprocessing.background;
    context.fillRect(0, 0, bitmap.width, bitmap.height);
  }
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height).data;
}

function sigmoid(logit) {
  return 1 / (1 + Math.exp(-logit));
}

function softmax(logits) {
  const largest = Math.max(...logits);
  const values = Array.from(logits, (logit) => Math.exp(logit - largest));
  const sum = values.reduce((a, b) => a + b);
  return values.map((value) => value / sum);
}

// List the five most probable classes, or if an image may have several those above 0.5.
function rank(probabilities) {
  const ordered = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a]);
  const reaches = (index) => probabilities[index] > 0.5;
  const best = model.multi_label ? ordered.filter(reaches) : ordered.slice(0, 5);
  if (!best.length) $("best").replaceChildren(element("li", "None of the classes."));
  else $("best").replaceChildren(
    ...best.map((index) => {
      const item = element("li");
      const percent = `${(100 * probabilities[index]).toFixed(1)} %`;
      const bar = element("span", "", "bar");
      bar.style.width = `${100 * probabilities[index]}%`;
      item.append(bar, element("span", model.class_names[index]), element("span", percent, "value"));
      item.dataset.index = index;
      item.dataset.probability = probabilities[index];
      return item;
    }),
  );
}

// Draw the part of the image that the network sees, and over it what the class token reads of each patch.
function show(bitmap, weights) {
  const { size, box } = geometry(bitmap.width, bitmap.height, model.preprocessing);
  const scales = [bitmap.width / size[0], bitmap.height / size[1]];
  const [left, top, width, height] = box.map((value, i) => value * scales[i % 2]);
  const context = $("photo").getContext("2d");
  context.imageSmoothingEnabled = width >= 64;
  context.imageSmoothingQuality = "high";
  const { background, fit, mean } = model.preprocessing;
  context.fillStyle = fit === "pad" ? `rgb(${padding(mean)})` : (background ?? "black");
  context.fillRect(0, 0, SIDE, SIDE);
  context.drawImage(bitmap, left, top, width, height, 0, 0, SIDE, SIDE);
  $("photo").hidden = false;
  $("hint").hidden = true;
  $("frame").classList.add("filled");
  const whole = left < 1 && top < 1 && left + width > bitmap.width - 1 && top + height > bitmap.height - 1;
  $("seen").textContent = whole ? "" : "The network sees this part of the image.";
  if (!weights) return;
  $("switch").hidden = false;
  $("map").getContext("2d").putImageData(colors(saliency(weights, Math.sqrt(weights.length), SIDE)), 0, 0);
  toggle();
}

function colors(values) {
  const image = new ImageData(SIDE, SIDE);
  values.forEach((value, i) => {
    const place = value * (INFERNO.length - 1);
    const below = Math.min(Math.floor(place), INFERNO.length - 2);
    for (let channel = 0; channel < 3; channel++) {
      const [from, to] = [INFERNO[below][channel], INFERNO[below + 1][channel]];
      image.data[4 * i + channel] = from + (to - from) * (place - below);
    }
    image.data[4 * i + 3] = 255;
  });
  return image;
}

function toggle() {
  $("map").hidden = !$("saliency").checked;
}

$("saliency").addEventListener("change", toggle);
addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("over");
});
addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("over");
  take(event.dataTransfer.files);
});
addEventListener("paste", (event) => take(event.clipboardData.files));
start().catch((error) => {
  say("");
  fail(new Error(`The network cannot be loaded: ${error.message}`));
});
