// Command storeproxy stands between clients of OpenAI's API and two kinds of engines, which share KV through a store.
package main

import (
	"bufio"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

const (
	maxBody = 64 << 20 // of a client's body, and of an engine's answer (draft#17.17)
	// steering matches the paths of what a client may not say (draft#12.1), legChanges what a prefill leg does not keep.
	steering = `((vllm_xargs|sampling_params\.extra_args|nvext)\.)?((kv|ec)_transfer_params|kv_hints?|routing|rid|` +
		`disaggregated_params|disagg_prefill_resp|bootstrap_(host|port|room|pair_key|info)|decode_tp_size|request_id|` +
		`routed_dp_rank|data_parallel_rank|disagg_prefill_dp_rank|session_params|cache_hit_threshold|prefill_result|` +
		`prefix_prompt_ids|kvcache_(load|store)_keys|encoder_result|mm_hashes|mm_content_hashes)|nvext\.(token_data|` +
		`annotations|session_control|(?s:.*)(worker_ids?|instance_id|dp_rank))|messages\[\]\.content\[\]\.uuid`
	nothing    = `\z.` // matches no path
	legChanges = `max_tokens|max_completion_tokens|stream|ignore_eos|stream_options|stop|stop_token_ids|min_tokens|n|` +
		`best_of|logprobs|top_logprobs|prompt_logprobs|echo|structured_outputs|response_format`
)

var (
	re        = regexp.MustCompile
	clientID  = re(`^[A-Za-z0-9._-]{1,128}$`)
	noID      = re(`___(prefill|decode)_addr_`)
	version   = re(`^"1\.(0|[1-9][0-9]{0,3})"$`)
	handedOn  = re(`"(producer|prefix|load_keys|lease)(\.[^"]*)?"`)
	halfPair  = re(`\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u([dD][89a-fA-F])..|.)`) // in the group
	loopback  = re(`(?i)^(localhost|(::ffff:)?127(\.\d+){3}|::1)$`)
	paramName = re(`^[a-z_]+$`)
	refusal   = re(`^400 kv_transfer_params(\.|$)`) // of what the proxy has added (draft#17.23)
	lastEvent = re(`^data:\s*\[DONE\]\s*$`)
	tokenIDs  = re(`^\[[\s\d,]+\]$`)
	// types has the members of section 3 by the form of their values; those with "!" are required (draft#3.3).
	types = map[*regexp.Regexp]string{
		re(`^"`): `version! request_id! transfer.id! phase! mode! producer.id! producer.incarnation producer.address
			consumer.id! consumer.incarnation consumer.address on_load_failure isolation.cache_salt isolation.lora
			signature.alg! signature.kid! signature.aud! signature.nonce! signature.native! signature.value!
			prefix.packed prefix.digest`,
		re(`^\d+$`): `transfer.attempt! lease.ttl_ms! usage.prompt_tokens usage.cached_tokens usage.computed_tokens
			usage.loaded_tokens usage.loaded_bytes usage.saved_tokens usage.saved_bytes signature.iat! signature.exp!
			prefix.count!`,
		re(`^\{`):                               `transfer! producer consumer lease isolation usage signature extensions`,
		re(`^\[\s*("([^"\\]|\\.)*"[\s,]*)*\]$`): `store_keys load_keys must_understand`,
		re(`^\[[\s\d,]*\]$`):                    `prefix.ids`, re(`^(\{|\[[\s\d,]*\]$)`): `prefix`,
	}
	engines   = map[string][]string{} // the URLs of engines, by their phase
	run       [16]byte                // random, and different in every run; with count it makes an id (draft#3.15)
	count     atomic.Uint64
	transport = &http.Transport{DisableCompression: true, ResponseHeaderTimeout: 300 * time.Second}
)

// A failure is thrown by require and caught by try. After the status 503 another engine is tried (draft#17.22).
type failure struct {
	status         int
	message, param string
}

// require throws a failure unless the condition holds.
func require(condition bool, status int, message string) {
	if !condition {
		panic(&failure{status, message, ""})
	}
}

// parse reads one object in JSON, and throws the status for what draft#3.1 and draft#17.7 forbid. It gives the object
// without the members whose paths match drop, otherwise byte for byte (draft#17.1), and all values by their paths.
func parse(text, drop string, status int) (kept string, values map[string]string) {
	text = strings.Trim(text, " \t\r\n")
	valid := utf8.ValidString(text) && json.Valid([]byte(text)) // which counts 10,000 levels
	require(valid && text[0] == '{', status, "this is not an object in JSON")
	for _, escape := range halfPair.FindAllStringSubmatch(text, -1) {
		require(escape[1] == "", status, "there is half a surrogate pair")
	}
	dropped, reader := regexp.MustCompile(`^(`+drop+`)$`), json.NewDecoder(strings.NewReader(text))
	reader.UseNumber()
	done, out, values := int64(0), make([]byte, 0, len(text)), map[string]string{}
	next := func() json.Token { // copies a token and what stands before it
		token, _ := reader.Token()
		out, done = append(out, text[done:reader.InputOffset()]...), reader.InputOffset()
		return token
	}
	var read func(path string)
	read = func(path string) {
		from := done
		token, seen, first := next(), map[json.Token]bool{}, true
		number, isNumber := token.(json.Number)
		_, err := number.Float64()
		tooLarge := err != nil && strings.ContainsAny(number.String(), ".eE")
		require(!isNumber || !tooLarge, status, "there is a number that no double holds")
		open, nested := token.(json.Delim)
		for nested && reader.More() {
			if offset := reader.InputOffset(); first && text[offset] == ',' {
				done = offset + 1 // what stood before the comma is dropped
			}
			start, inner := len(out), fmt.Sprintf("%.100s[]", path) // paths stay short: no rule is about longer ones
			if open == '{' {
				name := next()
				require(!seen[name], status, "a name stands twice in one object")
				seen[name], inner = true, strings.TrimPrefix(fmt.Sprintf("%.100s.%s", path, name), ".")
			}
			read(inner)
			gone := dropped.MatchString(inner)
			if first = first && gone; gone {
				out = out[:start]
			}
		}
		if nested {
			next()
		}
		values[path] = strings.TrimLeft(text[from:done], ",: \t\r\n")
	}
	read("")
	return string(out), values
}

// add writes more members at the end of an object.
func add(object, members string) string {
	return "{" + strings.TrimPrefix(strings.TrimSpace(object[1:len(object)-1])+", "+members, ", ") + "}"
}

// decoded gives the text that a value in JSON stands for, and none for a value that is no text.
func decoded(value string) (text string) {
	_ = json.Unmarshal([]byte(value), &text)
	return text
}

// whole reads a body of at most maxBody (draft#17.17), and throws the status for another one.
func whole(body io.Reader, status int) string {
	text, err := io.ReadAll(io.LimitReader(body, maxBody+1))
	require(err == nil && len(text) <= maxBody, status, "a body is too long, or not whole")
	return string(text)
}

// A request is a client's without what it may not say, with what its documents have, and what prefill has answered.
type request struct {
	*http.Request
	id, body, isolation, transfer, details string
	values, result                         map[string]string // by their paths: of the body, of the prefill_result
	own                                    map[string]string // members of documents that an answer may leave out
	until                                  time.Time         // the end of the lease
	number, attempt                        uint64            // of the request in this run, and of its try
	started                                bool              // whether the client has got bytes of a stream
}

// receive reads a client's request, with its salt (draft#17.11) and the prefix of a prompt of token ids (draft#17.9).
func (q *request) receive() {
	known := q.Method == "POST" && (q.URL.Path == "/v1/completions" || q.URL.Path == "/v1/chat/completions")
	require(known, 404, "only POST to /v1/completions and /v1/chat/completions is answered")
	q.body, q.values = parse(whole(q.Body, 413), steering, 400)
	if salt := q.values["cache_salt"]; strings.HasPrefix(salt, `"`) {
		q.isolation = `, "isolation": {"cache_salt": ` + salt + `}`
	}
	var ids []uint32
	if prompt := q.values["prompt"]; tokenIDs.MatchString(prompt) && json.Unmarshal([]byte(prompt), &ids) == nil {
		digest := sha256.New()
		_ = binary.Write(digest, binary.LittleEndian, ids)
		q.own["prefix"] = fmt.Sprintf(`, "prefix": {"count": %d, "digest": "sha256:%x"}`, len(ids), digest.Sum(nil))
	}
}

// send sends the leg of a phase with its document, and gives an answer of the status 200. Others throw a failure.
func (q *request) send(phase, role, body, members string, limit time.Duration) *http.Response {
	number := (q.number + q.attempt) % uint64(len(engines[phase]))
	q.own[role] = fmt.Sprintf(`, "%s": {"id": "%s-%d"}`, role, phase, number)
	body = add(body, fmt.Sprintf(`"kv_transfer_params": {"kvparams": {"version": "1.0", "request_id": "%s", `+
		`"transfer": %s, "phase": "%s", "mode": "store"%s%s%s}}`,
		q.id, q.transfer, phase, q.own[role], q.isolation, members))
	url := engines[phase][number] + q.URL.Path
	leg, err := http.NewRequestWithContext(q.Context(), "POST", url, strings.NewReader(body)) // draft#17.25
	require(err == nil, 500, "the leg cannot be made")
	leg.Header = http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {q.id}}
	for _, name := range []string{"Traceparent", "Tracestate", "Authorization"} { // draft#17.6
		leg.Header[name] = q.Header[name]
	}
	stay := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	response, err := (&http.Client{Transport: transport, Timeout: limit, CheckRedirect: stay}).Do(leg)
	require(err == nil, 503, "no engine has answered")
	if response.StatusCode == 200 {
		return response
	}
	defer response.Body.Close()
	require(response.StatusCode/100 == 4, 503, "no engine could do it")
	var said struct{ Error struct{ Param string } }
	_ = json.Unmarshal([]byte(whole(response.Body, 503)), &said)
	status, param := response.StatusCode, said.Error.Param
	ours := refusal.MatchString(fmt.Sprint(status, " ", param)) ||
		q.Header.Get("Authorization") == "" && (status == 401 || status == 403)
	require(!ours, 502, "an engine has refused what the proxy has added")
	panic(&failure{status, "an engine has refused the request", paramName.FindString(param)}) // draft#17.24
}

// prefill sends the prefill leg (draft#17.2, draft#17.3), and checks the answer before anything of it is used.
func (q *request) prefill() {
	leg, _ := parse(q.body, legChanges, 400)
	leg = add(leg, `"max_tokens": 1, "stream": false, "ignore_eos": true`)
	if q.values["max_completion_tokens"] != "" {
		leg = add(leg, `"max_completion_tokens": 1`)
	}
	response := q.send("prefill", "producer", leg, q.own["prefix"], 300*time.Second)
	defer response.Body.Close()
	text, received, known := whole(response.Body, 503), time.Now(), map[string]bool{}
	_, answer := parse(text, nothing, 503)
	q.details = answer["usage.prompt_tokens_details"]
	_, q.result = parse(answer["kv_transfer_params.kvparams"], nothing, 502) // draft#17.13
	require(version.MatchString(q.result["version"]), 502, "a prefill engine has sent no document of version 1")
	for form, names := range types {
		for _, name := range strings.Fields(names) {
			path := strings.TrimSuffix(name, "!")
			parent, value := q.result[strings.TrimSuffix(path[:strings.LastIndex("."+path, ".")], ".")], q.result[path]
			absent := (path == name || !strings.HasPrefix(parent, "{")) && (value == "" || value == "null")
			require(absent || form.MatchString(value), 502, "a prefill engine has sent a broken document")
			known[path] = true
		}
	}
	told := fmt.Sprintf(`{"id": "%s", "attempt": %s}`, decoded(q.result["transfer.id"]), q.result["transfer.attempt"])
	fits := told == q.transfer && decoded(q.result["request_id"]) == q.id && decoded(q.result["mode"]) == "store"
	require(fits && decoded(q.result["phase"]) == "prefill_result", 502, "a prefill engine has sent another document")
	var names []string
	_ = json.Unmarshal([]byte(q.result["must_understand"]), &names)
	for _, name := range names {
		require(known[name], 502, "a prefill engine wants something to be understood that is not known here")
	}
	if address := decoded(q.result["producer.address"]); address != "" {
		host, _, err := net.SplitHostPort(address)
		own := response.Request.URL.Hostname()
		same := strings.EqualFold(host, own) || loopback.MatchString(host) && loopback.MatchString(own)
		require(err == nil && same, 502, "a prefill engine has sent the address of another host")
	}
	lease, err := time.ParseDuration(q.result["lease.ttl_ms"] + "ms")
	if err != nil {
		lease = 24 * time.Hour // there is none
	}
	q.until = received.Add(lease)
}

// decode sends the decode leg with what the prefill_result hands on (draft#17.14), and passes the answer on.
func (q *request) decode(w http.ResponseWriter) {
	members, left := "", time.Until(q.until)
	require(left > 0, 503, "the lease of the KV is over")
	for _, name := range []string{"producer", "prefix", "load_keys", "lease"} {
		value := q.result[name]
		if name == "lease" && strings.HasPrefix(value, "{") {
			value, _ = parse(value, "ttl_ms", 502)
			value = add(value, fmt.Sprintf(`"ttl_ms": %.0f`, math.Max(1, math.Floor(left.Seconds()*1000)))) // draft#17.16
		}
		if value != "" {
			members += fmt.Sprintf(`, "%s": %s`, name, value)
		} else {
			members += q.own[name]
		}
	}
	if names := handedOn.FindAllString(q.result["must_understand"], -1); names != nil { // draft#6.9
		members += `, "must_understand": [` + strings.Join(names, ", ") + `]`
	}
	response := q.send("decode", "consumer", q.body, members, 0)
	defer response.Body.Close()
	if !strings.HasPrefix(response.Header.Get("Content-Type"), "text/event-stream") {
		_, _ = io.WriteString(w, q.public(whole(response.Body, 503)))
		return
	}
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, maxBody)
	for done := false; !done; q.started = true { // each line as it comes (draft#17.18)
		require(lines.Scan(), 503, "the stream of an engine has ended early") // draft#17.19
		line := lines.Text()
		if done = lastEvent.MatchString(line); done {
			line += "\n"
		} else if strings.HasPrefix(line, "data:") {
			line = "data: " + q.public(line[len("data:"):])
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, line+"\n")
		w.(http.Flusher).Flush()
	}
}

// public gives what the client gets of an answer or an event (draft#12.2), with prefill's details (draft#17.20).
func (q *request) public(text string) string {
	answer, values := parse(text, "kv_transfer_params", 503)
	require(values["error"] == "" || values["error"] == "null", 503, "an engine has failed")
	if usage := values["usage"]; strings.HasPrefix(usage, "{") && q.details != "" {
		answer, _ = parse(answer, "usage", 503)
		usage, _ = parse(usage, "prompt_tokens_details", 503)
		answer = add(answer, `"usage": `+add(usage, `"prompt_tokens_details": `+q.details))
	}
	return answer
}

// try makes a try of its own transfer (draft#3.7, draft#4.3) and engines. If it fails, up to two more follow it.
func (q *request) try(w http.ResponseWriter) {
	q.attempt++
	defer func() {
		thrown := recover()
		if thrown == nil {
			return
		}
		fault := thrown.(*failure)
		param := strings.Replace(strconv.Quote(fault.param), `""`, "null", 1)
		text := fmt.Sprintf(`{"error": {"message": %q, "type": "proxy_error", "param": %s, "code": null}}`,
			fault.message, param) // draft#17.21
		if q.started {
			_, _ = io.WriteString(w, "\ndata: "+text+"\n\n")
		} else if fault.status == 503 && q.attempt < 3 {
			q.try(w)
		} else {
			w.WriteHeader(fault.status)
			_, _ = io.WriteString(w, text)
		}
	}()
	if q.attempt == 1 {
		q.receive()
	}
	q.transfer = fmt.Sprintf(`{"id": "%x-%d-%d", "attempt": %d}`, run, q.number, q.attempt, q.attempt)
	if time.Until(q.until) <= 0 { // there is no KV, or no more (draft#17.15)
		q.prefill()
	}
	q.decode(w)
}

// serve answers a request under the client's id, or under one of its own (draft#17.5, draft#17.21).
func serve(w http.ResponseWriter, r *http.Request) {
	q := &request{Request: r, id: r.Header.Get("X-Request-Id"), number: count.Add(1), own: map[string]string{}}
	if !clientID.MatchString(q.id) || noID.MatchString(q.id) {
		q.id = fmt.Sprintf("%x-%d", run, q.number)
	}
	w.Header().Set("X-Request-Id", q.id)
	w.Header().Set("Content-Type", "application/json")
	q.try(w)
}

// main listens on the port. An engine's name is its phase and its number.
func main() {
	port := flag.Int("port", 8000, "the port to listen on")
	for _, phase := range []string{"prefill", "decode"} {
		phase := phase
		flag.Func(phase, "the URL of an engine for this phase; repeat for several", func(url string) error {
			engines[phase] = append(engines[phase], strings.TrimRight(url, "/"))
			return nil
		})
	}
	flag.Parse()
	if _, err := rand.Read(run[:]); err != nil || len(engines["prefill"]) == 0 || len(engines["decode"]) == 0 {
		log.Fatal("-prefill and -decode are needed")
	}
	log.Fatal(http.ListenAndServe(fmt.Sprintf(":%d", *port), http.HandlerFunc(serve)))
}
