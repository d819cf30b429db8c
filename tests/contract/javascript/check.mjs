// Reads nothing but the folder of one version of the protocol (its schema, its tables and its vectors) and agrees with every vector, or
// says where it does not. Shares no code with anything else in this project: it was written from spec.md.
//
//     node tests/contract/javascript/check.mjs spec/1.0
//     node tests/contract/javascript/check.mjs spec/1.0 spec/dialects     tables and vectors of the second, schema of the first

import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { Reader } from "./documents.mjs";
import { chain } from "./chain.mjs";
import { Dialect, lifted, lowered } from "./dialects.mjs";
import { readEvents } from "./events.mjs";
import { dump, NotJson, parse, same } from "./json.mjs";
import { keyOf, namespaceDigest, pagesOf, refusal as pageRefusal, write } from "./pages.mjs";
import { canonicalDocument, canonicalNative, refusal as signatureRefusal } from "./signatures.mjs";
import { downgrade, negotiate } from "./versions.mjs";

const VECTOR_LEVELS = 512; // a vector holds documents that are too deep for a reader
const SKEW_S = 30n;

class Disagreement extends Error {}

function agree(what, found, wanted) {
  if (!same(found ?? null, wanted ?? null))
    throw new Disagreement(`${what}: ${dump(found ?? null)} here, ${dump(wanted ?? null)} in the vector`);
}

// Indexes count as integers on both sides.
const written = ({ path, kind }) => ({
  path: path.map((step) => (typeof step === "string" ? step : BigInt(step))),
  kind,
});

function agreeOnProblems(problems, wanted) {
  const ordered = (all) => all.map((one) => dump(written(one))).sort();
  agree("problems", ordered(problems), ordered(wanted));
}

const hex = (text) => Buffer.from(text, "hex");

/** For each kind of vector, how a case of it is judged. */
function judges(reader, tables, carriers) {
  return {
    dialect(one, { dialect: name, mode, extension }) {
      const dialect = new Dialect(tables[name], reader);
      agree("mode and extension", [dialect.mode, dialect.extension], [mode, extension]);
      const { message, carrier, place } = lifted(one.message, carriers);
      agree("carrier", carrier?.name, one.carrier);
      agreeOnProblems(dialect.problems(message, one.phase, one.engine).map(place), one.valid ? [] : one.problems);
      if (!one.valid) return;
      agreeOnProblems(reader.problems(one.document), []);
      agree("document", dialect.decode(message, one.phase, one.engine), one.document);
      const again = lifted(lowered(dialect.encode(one.document, one.engine), carrier), carriers);
      agree("message", [again.message, again.carrier], [message, carrier]);
    },
    document(one) {
      let document;
      try {
        document = "text" in one ? parse(one.text) : one.document;
      } catch (error) {
        if (!(error instanceof NotJson)) throw error;
        return agreeOnProblems([{ path: [], kind: "json" }], one.valid ? [] : one.problems);
      }
      agreeOnProblems(reader.problems(document), one.valid ? [] : one.problems);
      if (one.valid) agree("read and written", parse(dump(document)), document);
      if ("document" in one)
        agree("the schema alone", reader.schemaAccepts(document), one.valid || one.beyond_schema === true);
    },
    carrier(one) {
      const value = one.kv_transfer_params;
      for (const given of typeof value === "string" ? [value] : [value, dump(value)]) {
        const found = reader.readCarrier(given, "r", "t");
        agreeOnProblems(found.problems ?? [], one.valid ? [] : one.problems);
        if (one.valid) agree("document", found.documents?.[0] ?? found.document, one.document);
      }
    },
    trio(one) {
      const found = reader.readTrio(one.trio, "r", "t");
      agreeOnProblems(found.problems ?? [], one.valid ? [] : one.problems);
      if (one.valid) agree("documents", found.documents, one.documents);
    },
    events(one) {
      const found = readEvents(one);
      agreeOnProblems(found.problems ?? [], one.valid ? [] : one.problems);
      if (!one.valid) return;
      for (const batch of found.batches) if ("problems" in batch) batch.problems = batch.problems.map(written);
      agree("batches", found.batches, one.batches);
    },
    keys(one) {
      const pages = pagesOf(one.namespace, one.token_ids, one.extras);
      agree("namespace", namespaceDigest(one.namespace).toString("hex"), one.namespace_digest);
      agree(
        "chains",
        pages.map((page) => page.chain.toString("hex")),
        one.chains,
      );
      agree(
        "keys",
        pages.map((page) => keyOf(one.namespace, page, one.rectangle)),
        one.keys,
      );
    },
    pages(one) {
      const page = pagesOf(one.namespace, one.token_ids, [])[Number(one.page)];
      const [stored, keys] = [hex(one.stored), (one.keys ?? []).map(hex)];
      agree("refused", pageRefusal(one.namespace, page, one.rectangle, stored, keys), one.refused);
      if (one.refused === null && (keys.length === 0 || "sealed" in one)) {
        const made = write(one.namespace, page, one.rectangle, hex(one.payload), one.sealed, keys[0]);
        agree("page", made.toString("hex"), one.stored);
      }
    },
    chain(one) {
      agree("chain", chain(one), { number: one.number, hashes: one.hashes });
    },
    versions(one) {
      if ("ours" in one) return agree("version", negotiate(one.ours, one.theirs), one.version);
      const wanted = "lost" in one ? { lost: one.lost } : { downgraded: one.downgraded };
      agree("downgrade", downgrade(one.document, one.to, one.added), wanted);
    },
    signature(one) {
      agree("refused", signatureRefusal(one, SKEW_S), one.refused);
      if ("canonical" in one) {
        agree("canonical", canonicalDocument(one.kv_transfer_params.kvparams), one.canonical);
        agree("canonical_native", canonicalNative(one.kv_transfer_params), one.canonical_native);
      }
    },
  };
}

function files(folder, below = "") {
  return readdirSync(join(folder, below), { withFileTypes: true })
    .sort((one, other) => (one.name < other.name ? -1 : 1))
    .flatMap((entry) => {
      const path = join(below, entry.name);
      if (entry.isDirectory()) return files(folder, path);
      return entry.name.endsWith(".json") ? [path] : [];
    });
}

function main(release, folder = release) {
  const read = (within, name) => parse(readFileSync(join(within, name)));
  const carriers = folder === release ? [] : read(folder, "carriers.json");
  const judged = judges(new Reader(read(release, "schema.json")), read(folder, "dialects.json"), carriers);
  const disagreements = [];
  let count = 0;
  for (const path of files(join(folder, "vectors"))) {
    const content = parse(readFileSync(join(folder, "vectors", path)), VECTOR_LEVELS);
    const judge = judged[content.kind];
    if (judge === undefined) {
      disagreements.push(`${path}: nobody here knows vectors of the kind ${content.kind}`);
      continue;
    }
    let agreed = 0;
    for (const one of content.cases) {
      try {
        judge(one, content);
        agreed += 1;
      } catch (error) {
        const why = error instanceof Disagreement ? error.message : error.stack;
        disagreements.push(`${path}: ${one.name}: ${why}`);
      }
    }
    count += content.cases.length;
    console.log(`${path}: ${agreed} of ${content.cases.length} ${content.kind}`);
  }
  if (count === 0) disagreements.push(`no vectors in ${folder}`);
  disagreements.forEach((line) => console.log(`DISAGREES ${line}`));
  console.log(`${count} vectors, ${disagreements.length} disagreements`);
  return disagreements.length === 0 ? 0 : 1;
}

process.exitCode = main(...process.argv.slice(2));
