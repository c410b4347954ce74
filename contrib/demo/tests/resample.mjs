// Prepares images with the page's own code, whose resample.js lies beside it as page.mjs: JSON in, JSON out.
import fs from "fs";
import { prepare, saliency } from "./page.mjs";
const asked = JSON.parse(fs.readFileSync(0, "utf8"));
const images = asked.images.map(({ pixels, width, height, how }) => {
  const { input, seen } = prepare(Uint8ClampedArray.from(pixels), width, height, how);
  return { seen: [...seen], input: [...input] };
});
console.log(JSON.stringify({ images, saliency: [...saliency(asked.weights, 4, 32)] }));
