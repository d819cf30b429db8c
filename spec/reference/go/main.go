// A store proxy in Go, written from spec/draft/store-proxy.md and the conformance kit alone.
//
//	go build -o store_proxy . && ./store_proxy -port 8100 -prefill http://a:8000 -decode http://b:8000
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

const tries, maxBody, maxAnswer, prefillTime = 3, 16 << 20, 64 << 20, 10 * time.Minute

var forbidden = list(`kv_transfer_params ec_transfer_params kv_hints kv_hint disaggregated_params disagg_prefill_resp
	bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank
	disagg_prefill_dp_rank session_params rid request_id cache_hit_threshold prefix_prompt_ids kvcache_load_keys
	kvcache_store_keys prefill_result bootstrap_info encoder_result routing mm_hashes mm_content_hashes`)
var answerAlone = list(`stream_options stop stop_token_ids min_tokens n best_of logprobs top_logprobs prompt_logprobs echo
	structured_outputs response_format`)
var places = list(`.vllm_xargs .sampling_params.extra_args .nvext`)
var nvext = regexp.MustCompile(`^(backend_instance_id|token_data|annotations|session_control|.*(worker_id|instance_id|worker_ids|dp_rank))$`)
var media = regexp.MustCompile(`^\.messages\.\d+\.content\.\d+$`)
var safeID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)
var version = regexp.MustCompile(`^1\.(0|[1-9][0-9]{0,3})$`)
var address = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+|:\d{2,5}\b`)
var known = regexp.MustCompile(`^((producer|consumer)(\.(id|incarnation|address))?|lease(\.ttl_ms)?|transfer(\.(id|attempt))?|prefix|load_keys|version|request_id|phase|mode|isolation|usage)$`)
var errLeg = errors.New("a leg has failed")

type engine struct{ name, url string }
type refusal struct {
	status         int
	message, param string
}
type exchange struct {
	context             context.Context
	path, requestID, id string
	headers             http.Header
	body                string
}
type handoff struct {
	result, details string
	producer        engine
	ttl             int
	came            time.Time
	critical        []string
}

var engines = map[string][]engine{}
var transfers int64
var run = randomID()
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}

func (r *refusal) Error() string { return r.message }

func list(text string) members {
	found := members{}
	for _, word := range strings.Fields(text) {
		found[word] = ""
	}
	return found
}

func serve(w http.ResponseWriter, r *http.Request) {
	x := &exchange{context: r.Context(), path: r.URL.Path, requestID: r.Header.Get("X-Request-Id"), headers: r.Header}
	if !safeID.MatchString(x.requestID) || strings.Contains(x.requestID, "___prefill_addr_") || strings.Contains(x.requestID, "___decode_addr_") {
		x.requestID = randomID()
	}
	w.Header().Set("X-Request-Id", x.requestID)
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		x.body, err = parse(raw)
	}
	if err != nil || r.Method != "POST" {
		answerError(w, &refusal{400, "the body must be one object in JSON, without a name twice", ""})
		return
	}
	x.body = without(x.body, "")
	var kv *handoff
	for attempt := 1; attempt <= tries; attempt++ {
		x.id = fmt.Sprintf("%s-%d", run, atomic.AddInt64(&transfers, 1))
		err = nil
		if kv == nil || time.Since(kv.came) >= time.Duration(kv.ttl)*time.Millisecond {
			kv, err = x.prefill(attempt)
		}
		if err == nil {
			err = x.decode(attempt, kv, w)
		}
		if err != errLeg || r.Context().Err() != nil {
			break
		}
	}
	if r.Context().Err() == nil && err != nil {
		answerError(w, err)
	}
}

func (x *exchange) document(attempt int, phase string, more members) string {
	made := members{"version": `"1.0"`, "request_id": quote(x.requestID), "phase": quote(phase), "mode": `"store"`,
		"transfer": fmt.Sprintf(`{"id":%q,"attempt":%d}`, x.id, attempt)}
	var ids []uint32
	if json.Unmarshal([]byte(get(x.body, "prompt")), &ids) == nil && len(ids) > 0 {
		packed := new(bytes.Buffer)
		binary.Write(packed, binary.LittleEndian, ids)
		made["prefix"] = fmt.Sprintf(`{"count":%d,"digest":"sha256:%x"}`, len(ids), sha256.Sum256(packed.Bytes()))
	}
	if salt := get(x.body, "cache_salt"); salt != "" && salt != "null" {
		made["isolation"] = `{"cache_salt":` + salt + "}"
	}
	for name, text := range more {
		made[name] = text
	}
	return `{"kvparams":` + edit("{}", made) + "}"
}

func (x *exchange) prefill(attempt int) (*handoff, error) {
	to := take("prefill")
	changes := members{"max_tokens": "1", "stream": "false", "ignore_eos": "true"}
	for name := range answerAlone {
		changes[name] = ""
	}
	if get(x.body, "max_completion_tokens") != "" {
		changes["max_completion_tokens"] = "1"
	}
	changes["kv_transfer_params"] = x.document(attempt, "prefill", members{"producer": `{"id":` + quote(to.name) + "}"})
	bounded, cancel := context.WithTimeout(x.context, prefillTime)
	defer cancel()
	answered, err := x.send(bounded, to, changes)
	if err != nil {
		return nil, err
	}
	body, err := x.read(answered)
	if err != nil {
		return nil, err
	}
	kv := &handoff{result: get(body, "kv_transfer_params", "kvparams"), details: get(body, "usage", "prompt_tokens_details"), producer: to, ttl: 600_000, came: time.Now()}
	if !kv.fits(x, attempt) {
		return nil, &refusal{502, "the prefill engine's answer is not one to this leg", ""}
	}
	return kv, nil
}

func (kv *handoff) fits(x *exchange, attempt int) bool {
	var found struct {
		Version, Phase, Mode string
		RequestID            string `json:"request_id"`
		Transfer             struct {
			ID      string
			Attempt int
		}
		Lease *struct {
			TTL int `json:"ttl_ms"`
		}
		Keys     []string `json:"load_keys"`
		Producer *struct{ ID, Address string }
		Critical []string `json:"must_understand"`
	}
	if json.Unmarshal([]byte(kv.result), &found) != nil || !version.MatchString(found.Version) || found.Phase != "prefill_result" || found.Mode != "store" ||
		found.RequestID != x.requestID || found.Transfer.ID != x.id || found.Transfer.Attempt != attempt {
		return false
	}
	if found.Lease != nil {
		kv.ttl = found.Lease.TTL
	}
	own, _ := url.Parse(kv.producer.url)
	if kv.ttl < 1 || kv.ttl > 86_400_000 || found.Producer != nil && (found.Producer.ID == "" || found.Producer.Address != "" && !strings.HasPrefix(found.Producer.Address, own.Hostname()+":")) {
		return false
	}
	for _, name := range found.Critical {
		if !known.MatchString(name) {
			return false
		}
		if strings.Contains(" producer prefix load_keys lease ", " "+strings.Split(name, ".")[0]+" ") {
			kv.critical = append(kv.critical, quote(name))
		}
	}
	return true
}

func (x *exchange) decode(attempt int, kv *handoff, w http.ResponseWriter) error {
	to, told := take("decode"), members{"producer": `{"id":` + quote(kv.producer.name) + "}"}
	for _, name := range []string{"producer", "prefix", "load_keys", "lease"} {
		if text := get(kv.result, name); text != "" {
			told[name] = text
		}
	}
	if lease := told["lease"]; lease != "" && lease != "null" {
		left := kv.ttl - int((time.Since(kv.came)+time.Millisecond-1)/time.Millisecond)
		if left < 1 {
			left = 1
		}
		told["lease"] = edit(lease, members{"ttl_ms": strconv.Itoa(left)})
	}
	if len(kv.critical) > 0 {
		told["must_understand"] = "[" + strings.Join(kv.critical, ",") + "]"
	}
	told["consumer"] = `{"id":` + quote(to.name) + "}"
	answered, err := x.send(x.context, to, members{"kv_transfer_params": x.document(attempt, "decode", told)})
	if err != nil {
		return err
	}
	if answered.StatusCode == 200 && strings.HasPrefix(answered.Header.Get("Content-Type"), "text/event-stream") {
		relay(answered, kv, w)
		return nil
	}
	body, err := x.read(answered)
	if err == nil {
		answer(w, 200, kv.corrected(body))
	}
	return err
}

func (kv *handoff) corrected(body string) string { // an answer or an event as the client gets it
	changes := members{"kv_transfer_params": ""}
	if usage := get(body, "usage"); strings.HasPrefix(usage, "{") && kv.details != "" {
		changes["usage"] = edit(usage, members{"prompt_tokens_details": kv.details})
	}
	return edit(body, changes)
}

func relay(answered *http.Response, kv *handoff, w http.ResponseWriter) {
	defer answered.Body.Close()
	w.Header().Set("Content-Type", "text/event-stream")
	reader, done := bufio.NewReaderSize(answered.Body, 1<<20), false
	for {
		line, err := reader.ReadSlice('\n')
		if err == io.EOF && len(line) == 0 {
			break
		} else if err != nil {
			panic(http.ErrAbortHandler) // the client's connection breaks as the engine's did
		}
		data := bytes.TrimSpace(bytes.TrimPrefix(line, []byte("data:")))
		done = done || string(data) == "[DONE]"
		if event, err := parse(data); err == nil {
			line = []byte("data: " + kv.corrected(event) + "\n")
		}
		w.Write(line)
		w.(http.Flusher).Flush()
	}
	if !done {
		io.WriteString(w, `data: {"error":{"message":"the engine broke off","type":"proxy_error"}}`+"\n\n")
	}
}

func (x *exchange) send(until context.Context, to engine, changes members) (*http.Response, error) {
	leg, _ := http.NewRequestWithContext(until, "POST", to.url+x.path, strings.NewReader(edit(x.body, changes)))
	leg.Header = http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {x.requestID}}
	for _, name := range []string{"Traceparent", "Tracestate", "Authorization"} {
		if value := x.headers.Values(name); value != nil {
			leg.Header[name] = value
		}
	}
	answered, err := client.Do(leg)
	if err != nil {
		return nil, errLeg
	}
	return answered, nil
}

func (x *exchange) read(answered *http.Response) (string, error) { // the body of a 200; otherwise what the status means
	defer answered.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(answered.Body, maxAnswer+1))
	status := answered.StatusCode
	body, broken := parse(raw)
	if err != nil || len(raw) > maxAnswer || status != 200 && (status < 400 || status > 499) || status == 200 && broken != nil {
		return "", errLeg
	} else if status == 200 {
		return body, nil
	}
	var said struct {
		Error struct{ Message, Param string }
	}
	json.Unmarshal(raw, &said)
	if strings.HasPrefix(said.Error.Param+".", "kv_transfer_params.") || x.headers.Get("Authorization") == "" && (status == 401 || status == 403) {
		return "", &refusal{502, "an engine refuses what the proxy has sent", ""}
	}
	if said.Error.Message == "" || address.MatchString(said.Error.Message) {
		said.Error.Message = "the engine refused the request"
	}
	return "", &refusal{status, said.Error.Message, said.Error.Param}
}

func answer(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	io.WriteString(w, text)
}

func answerError(w http.ResponseWriter, err error) {
	found := &refusal{502, "no engine has answered", ""}
	errors.As(err, &found)
	param := "null"
	if found.param != "" {
		param = quote(found.param)
	}
	answer(w, found.status, fmt.Sprintf(`{"error":{"message":%s,"type":"proxy_error","param":%s,"code":null}}`, quote(found.message), param))
}

func take(role string) engine {
	return engines[role][int(atomic.LoadInt64(&transfers))%len(engines[role])] // the next one for each try
}

func randomID() string {
	bits := make([]byte, 12)
	rand.Read(bits)
	return fmt.Sprintf("%x", bits)
}

func main() {
	port := flag.Int("port", 8100, "where to listen")
	for _, role := range []string{"prefill", "decode"} {
		role := role
		flag.Func(role, "the URL of an engine; repeat it for each", func(text string) error {
			engines[role] = append(engines[role], engine{fmt.Sprintf("%s-%d", role, len(engines[role])), text})
			return nil
		})
	}
	flag.Parse()
	fmt.Println(http.ListenAndServe(fmt.Sprintf("127.0.0.1:%d", *port), http.HandlerFunc(serve)))
}
