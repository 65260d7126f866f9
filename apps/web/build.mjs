// Bundles src/ into mlxinfer/server/page/built, or into the folder given as the first argument.
import { build } from "esbuild";
import { copyFile, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = resolve(process.argv[2] ?? join(here, "../../mlxinfer/server/page/built"));

// KaTeX names each font three times; every browser that shows the page reads woff2.
const woff2Only = {
  name: "woff2-only",
  setup(build) {
    build.onLoad({ filter: /katex(\.min)?\.css$/ }, async ({ path }) => ({
      contents: (await readFile(path, "utf8")).replace(
        /,\s*url\([^)]*\.(?:woff|ttf)\)\s*format\([^)]*\)/g,
        "",
      ),
      loader: "css",
      resolveDir: dirname(path),
    }));
  },
};

await mkdir(out, { recursive: true });
for (const name of await readdir(out)) await rm(join(out, name));
const { metafile } = await build({
  entryPoints: { app: join(here, "src/main.jsx") },
  absWorkingDir: here,
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  charset: "utf8",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none", // LICENSES.txt has them
  metafile: true,
  loader: { ".woff2": "file" },
  assetNames: "[name]",
  plugins: [woff2Only],
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) {
  await copyFile(join(here, "src", name), join(out, name));
}
await writeFile(join(out, "LICENSES.txt"), await licenses(Object.keys(metafile.inputs)));

// The licence of every package of which something was bundled.
async function licenses(inputs) {
  const packages = new Set();
  for (const input of inputs) {
    const found = /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input);
    if (found) packages.add(found[1]);
  }
  const texts = [];
  for (const name of [...packages].sort()) {
    const folder = join(here, "node_modules", name);
    const file = (await readdir(folder)).filter((each) => /^LICENSE/.test(each)).sort()[0];
    const text = (await readFile(join(folder, file), "utf8")).trim();
    texts.push(`${name}\n${"=".repeat(name.length)}\n\n${text}\n`);
  }
  return texts.join("\n\n");
}
