// Pictures that go with a question: read, made small enough to send, and kept as data URLs.

const MAX_EDGE = 2048; // pixels; models that see scale down to fewer
const MAX_BYTES = 2 * 2 ** 20; // of a picture that is sent as it is
const MAX_FILE_BYTES = 100 * 2 ** 20;
const AS_IT_IS = ["image/jpeg", "image/png", "image/webp"]; // what every server decodes
const SMALLER = [
  ["image/png", undefined],
  ["image/jpeg", 0.9],
  ["image/jpeg", 0.7],
];

// A drawing in SVG is text, and is attached as such.
export function isPicture(file) {
  return file.type.startsWith("image/") && file.type !== "image/svg+xml";
}

// The data URL of a picture: small files as they are, others scaled down and encoded anew.
export async function pictureOf(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} is larger than 100 MB.`);
  let drawn;
  try {
    drawn = await createImageBitmap(file); // turned as the camera was held
  } catch {
    throw new Error(`${file.name} is no picture that this browser can read: take a JPEG, PNG or WebP.`);
  }
  const scale = Math.min(1, MAX_EDGE / Math.max(drawn.width, drawn.height));
  const small = scale === 1 && file.size <= MAX_BYTES && AS_IT_IS.includes(file.type);
  const found = small ? file : await smaller(drawn, scale, file.type !== "image/jpeg");
  drawn.close();
  return urlOf(found);
}

// The first of the encodings that is small enough; PNG keeps letters of a screenshot sharp.
async function smaller(drawn, scale, sharp) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(Math.round(drawn.width * scale), 1);
  canvas.height = Math.max(Math.round(drawn.height * scale), 1);
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // JPEG has no transparency: what is behind would be black
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(drawn, 0, 0, canvas.width, canvas.height);
  let found;
  for (const [type, quality] of sharp ? SMALLER : SMALLER.slice(1)) {
    found = await new Promise((done) => canvas.toBlob(done, type, quality));
    if (found.size <= MAX_BYTES) break;
  }
  return found;
}

function urlOf(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(blob);
  });
}
