// Pictures of a message: read from files, made small, shown.
//
// Each is drawn and encoded anew: what is kept and sent is one frame of a bounded size, without the place where a camera
// took it. A file's name is only ever the text of an element or an attribute.

import { h, iconButton, set } from "./dom.js";

const MOST_PICTURES = 8; // of a message: together they take at most half of a request's body, of 16 MiB
const MOST_CHARS = 2 ** 20; // of the data: URL that is sent
const MOST_PIXELS = 2 ** 22; // sent: 2048 x 2048
const MOST_BYTES = 2 ** 26; // of a file, which the browser holds whole
const MOST_READ = 2 ** 26; // pixels of a file: decoded, they take 256 MB
const MOST_NAME = 80; // characters
const JPEG = [0.9, 0.75]; // qualities

const KEPT = /^data:image\/(?:png|jpeg);base64,[A-Za-z0-9+/]+=*$/;

/** Return whether `given`, from an imported file, is a picture as this page makes it. */
export function isPicture(given) {
  const isText = [given?.name, given?.url].every((value) => typeof value === "string");
  return isText && given.name.length <= MOST_NAME && given.url.length <= MOST_CHARS && KEPT.test(given.url);
}

/** Return the pictures as a list of elements; `removed`, called with one of them, adds its button. */
export function thumbnails(pictures, removed) {
  return pictures.map((picture) =>
    h(
      "li",
      {},
      h("img", { src: picture.url, alt: picture.name, title: picture.name }),
      removed && iconButton("close", `Remove ${picture.name}`, () => removed(picture)),
    ),
  );
}

/** The pictures of a message that is being written. changed: called after each change. */
export class Tray {
  constructor(changed = () => {}, pictures = []) {
    this.changed = () => {};
    this.element = h("ul", { class: "pictures", "aria-label": "Pictures of this message" });
    this.numReading = 0;
    this.put(pictures);
    this.changed = changed;
  }

  get isReading() {
    return this.numReading > 0;
  }

  put(pictures) {
    this.pictures = pictures;
    const remove = (picture) => this.put(this.pictures.filter((one) => one !== picture));
    this.element.replaceChildren(...thumbnails(pictures, remove));
    set(this.element, { hidden: !pictures.length });
    this.changed();
  }

  /** Add the pictures of these files. Returns what is wrong with the others, a sentence for each. */
  async add(files) {
    const problems = [];
    this.numReading += 1;
    this.changed();
    for (const file of files) {
      try {
        if (this.pictures.length >= MOST_PICTURES) throw new Error(`A message takes ${MOST_PICTURES} pictures.`);
        const url = await read(file);
        this.put([...this.pictures, { name: nameOf(file), url }]);
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.numReading -= 1;
    this.changed();
    return problems;
  }
}

/** Call `take` with the files of each drop and paste on this page, and of each choice in `field`, which `button` opens.
 *  The browser leaves the page for no drop. */
export function onFiles(button, field, take) {
  const mark = (isOver) => document.body.classList.toggle("dragging", isOver);
  const received = (event, files, isText) => {
    if (isText) return;
    event.preventDefault();
    if (files.length) take(files);
  };
  addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(Boolean(event.dataTransfer?.types.includes("Files")));
  });
  addEventListener("dragleave", ({ relatedTarget }) => relatedTarget || mark(false));
  addEventListener("drop", (event) => {
    mark(false);
    const files = [...(event.dataTransfer?.files ?? [])];
    received(event, files, !files.length && event.target.matches?.("textarea, input"));
  });
  addEventListener("paste", (event) => {
    const data = event.clipboardData;
    const files = [...(data?.files ?? [])];
    received(event, files, !files.length || data.getData("text/plain")); // cells have a picture, too
  });
  button.addEventListener("click", () => field.click());
  field.addEventListener("change", () => {
    take([...field.files]);
    field.value = "";
  });
}

const nameOf = (file) => (file.name || "picture").slice(0, MOST_NAME);

/** Return a file's picture as a data: URL of a PNG or a JPEG. Throws an Error that says what is wrong. */
async function read(file) {
  const name = nameOf(file);
  // An SVG is a program, whose size says nothing of its work.
  if (!file.type.startsWith("image/") || file.type.startsWith("image/svg"))
    throw new Error(`${name} is no picture of pixels.`);
  if (file.size > MOST_BYTES) throw new Error(`${name} has more than ${MOST_BYTES / 2 ** 20} MiB.`);
  const failed = () => {
    throw new Error(`This browser cannot read ${name}.`);
  };
  const image = await load(file).catch(failed);
  const { naturalWidth: width, naturalHeight: height } = image;
  if (width * height > MOST_READ)
    throw new Error(`${name} has ${width.toLocaleString("en")} × ${height.toLocaleString("en")} pixels, which is too large.`);
  await image.decode().catch(failed);
  return small(image, file.type === "image/jpeg");
}

/** Return a file as an image whose size is known, and which is not decoded yet. */
async function load(file) {
  const image = new Image();
  const loaded = new Promise((resolve, reject) => Object.assign(image, { onload: resolve, onerror: reject }));
  image.src = await dataUrl(file);
  await loaded;
  return image;
}

/** Return the picture as a data: URL: whole if it fits, or else as a JPEG, or smaller. */
async function small(image, isJpeg) {
  const { naturalWidth: width, naturalHeight: height } = image;
  const forms = JPEG.map((quality) => ["image/jpeg", quality]);
  for (let scale = Math.min(1, Math.sqrt(MOST_PIXELS / (width * height))); scale > 0.001; scale /= 2) {
    const canvas = h("canvas", { width: sized(width, scale), height: sized(height, scale) });
    const pen = canvas.getContext("2d");
    pen.fillStyle = "white"; // below what is transparent
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(image, 0, 0, canvas.width, canvas.height);
    for (const [type, quality] of isJpeg ? forms : [["image/png"], ...forms]) {
      const blob = await new Promise((resolve) => canvas.toBlob(resolve, type, quality));
      if (blob && blob.size < 0.74 * MOST_CHARS) return dataUrl(blob); // base64 takes 4 characters for 3 bytes
    }
  }
  throw new Error("This browser does not let pages draw pictures.");
}

const sized = (side, scale) => Math.max(1, Math.round(side * scale));

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
