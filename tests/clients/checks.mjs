// How the script of a Node client runs: `node CLIENT.mjs URL MODEL KEY [CHECK ...]`, every check to its end, whatever fails.
export const [URL, MODEL, KEY, ...names] = process.argv.slice(2); // URL without /v1
export const PROMPT = "Repeat after me: one two three four five";
export const UNICODE = "Žluťoučký kůň 🐎 skáče, 한글 и ёж";

export async function run(checks) {
  const chosen = Object.entries(checks).filter(([name]) => names.length === 0 || names.includes(name));
  const failed = [];
  for (const [name, check] of chosen) {
    try {
      await check();
      console.log("ok", name);
    } catch (error) {
      failed.push(name);
      console.log(`FAILED ${name}\n${error.stack}\n${error.responseBody ?? ""}`);
    }
  }
  console.log(`${chosen.length - failed.length} ok, ${failed.length} failed: ${failed.join(" ")}`);
  process.exit(failed.length || !chosen.length ? 1 : 0);
}
