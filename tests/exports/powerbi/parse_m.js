// Reads a JSON list of [name, M text] from standard input; prints each that does not parse.
const folder = process.argv[2];
const parser = require(require.resolve("@microsoft/powerquery-parser", { paths: [folder] }));
(async () => {
    let failures = 0;
    for (const [name, text] of JSON.parse(require("fs").readFileSync(0, "utf8"))) {
        const result = await parser.TaskUtils.tryLexParse(parser.DefaultSettings, text);
        if (result.resultKind !== "Ok" || result.error) {
            failures += 1;
            console.log(name, String(result.error && result.error.message));
        }
    }
    process.exit(failures ? 1 : 0);
})();
