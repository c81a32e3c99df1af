package resource

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
)

// HandlerOptions are the optional settings of [NewHandler]. The zero value enforces fencing.
type HandlerOptions struct {
	// Unfenced turns fencing off: every write is accepted, with or without a token, and no read raises the fence.
	// It's the unsafe baseline. The store must be an [Overwriter].
	Unfenced bool

	// MaxBody is the largest value in bytes; [DefaultMaxBody] if zero.
	MaxBody int64

	// Observer is told every decision before its answer leaves. The calls for one key come in the order in which the
	// store decided, given that nobody else uses the store: with an Observer set, requests to one key are decided one
	// at a time, and a request that has begun to be decided is finished even if its client goes away. A call that
	// ends in an error which isn't a refusal is not told, because its effect is unknown. A store that repeats by itself what
	// had no answer, as Amazon's clients do, may refuse its own write as applied: with an Observer it counts as accepted.
	Observer func(Decision)

	// Registerer takes the handler's metrics; nil for none.
	Registerer prometheus.Registerer

	// Token is what a request must present as "Authorization: Bearer TOKEN"; empty: anyone may call.
	Token string

	// Logger is told the errors of the store, whose details clients don't see; nil: nobody is.
	Logger *slog.Logger
}

// handler serves one store.
type handler struct {
	HandlerOptions
	store   Store
	metrics metrics

	seed    maphash.Seed
	stripes [64]sync.Mutex // by key; taken only for an Observer
}

// NewHandler returns the HTTP interface of store:
//
//	PUT /r/{key}   sets the value to the request's body. Needs X-Fence-Token; X-Fence-Seq counts a grant's writes from 1.
//	GET /r/{key}   answers the value and the greatest fence. With X-Fence-Token it's a fenced read, which raises the fence.
//
// With X-Fence-Key, the key once more and percent-escaped, a request whose path something on the way has rewritten to another
// key's is refused.
//
// A stale token is answered 409 {"error":"stale fencing token","seen":N,"got":M,"seen_seq":1,"got_seq":1,"applied":false}, a call that the store has no room for 507, with
// nothing changed. The key is all of the path after /r/,
// slashes included, and percent-escaped where URLs need it; the handler takes it as it comes, but an [http.ServeMux] in
// front of it redirects paths with "//", "." or ".." unless these are escaped, as [Client] does.
func NewHandler(store Store, opts *HandlerOptions) (http.Handler, error) {
	h := &handler{store: store, seed: maphash.MakeSeed()}
	if opts != nil {
		h.HandlerOptions = *opts
	}
	if _, ok := store.(Overwriter); h.Unfenced && !ok {
		return nil, fmt.Errorf("resource: fencing can't be turned off for a %T, which has no Overwrite", store)
	}
	if h.MaxBody < 0 {
		return nil, fmt.Errorf("resource: HandlerOptions.MaxBody is %d; it must not be negative", h.MaxBody)
	}
	if strings.ContainsFunc(h.Token, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }) {
		return nil, errors.New("resource: HandlerOptions.Token has a space or a control character, which no header brings")
	}
	h.MaxBody = cmp.Or(h.MaxBody, DefaultMaxBody)
	if h.Logger == nil {
		h.Logger = slog.New(slog.DiscardHandler)
	}
	var err error
	if h.metrics, err = newMetrics(h.Registerer); err != nil {
		return nil, fmt.Errorf("resource: %w", err)
	}
	return h, nil
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// What GET answers changes with every write, and a fenced GET changes the store: nothing on the way may keep it.
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if h.Unfenced {
		w.Header().Set(HeaderFencing, "off")
	}

	key, ok := strings.CutPrefix(r.URL.Path, pathPrefix)
	switch {
	case !ok:
		h.fail(w, http.StatusNotFound, "no such page; keys are under "+pathPrefix)
	case !h.authorized(r):
		w.Header().Set("WWW-Authenticate", "Bearer")
		h.fail(w, http.StatusUnauthorized, "the bearer token is missing or wrong: send it as Authorization: Bearer TOKEN")
	case r.Method == http.MethodPut:
		defer h.metrics.observe(OpWrite, time.Now())
		h.put(w, r, key)
	case r.Method == http.MethodGet, r.Method == http.MethodHead:
		defer h.metrics.observe(OpRead, time.Now())
		h.get(w, r, key)
	default:
		w.Header().Set("Allow", "GET, HEAD, PUT")
		h.fail(w, http.StatusMethodNotAllowed, "method "+r.Method+" is not supported: use PUT to write, GET or HEAD to read")
	}
}

func (h *handler) authorized(r *http.Request) bool {
	if h.Token == "" {
		return true
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	got, want := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(h.Token)) // equal lengths, so that time tells nothing
	return strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare(got[:], want[:]) == 1
}

func (h *handler) put(w http.ResponseWriter, r *http.Request, key string) {
	f, err := fenceOf(r.Header)
	if err == nil && f == (Fence{}) && !h.Unfenced {
		err = fmt.Errorf("%s is missing: send the fencing token of your lock grant, an integer from 1", HeaderToken)
	}
	if err := cmp.Or(checkTarget(r, key), err); err != nil {
		h.fail(w, http.StatusBadRequest, sentence(err))
		return
	}
	value, err := h.body(w, r)
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		h.fail(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("the value is larger than the limit of %d bytes", h.MaxBody))
		return
	}
	if err != nil {
		h.fail(w, http.StatusBadRequest, "nothing was written, the body ended early: "+err.Error())
		return
	}
	d := Decision{Op: OpWrite, Key: key, Fence: f, Enforced: !h.Unfenced, Value: value}
	rec, err := h.decide(r.Context(), d, func(ctx context.Context) (Record, error) {
		if h.Unfenced {
			return h.overwrite(ctx, key, f, value)
		}
		return Record{MaxFence: f}, h.store.Write(ctx, key, f, value)
	})
	if err != nil {
		h.refuse(w, r, err)
		return
	}
	h.metrics.writes.Inc()
	w.Header().Set(HeaderMax, rec.MaxFence.String())
	h.answer(w, http.StatusOK, struct {
		Key      string `json:"key"`
		MaxFence uint64 `json:"max_fence"`
	}{key, rec.MaxFence.Token})
}

func (h *handler) body(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if r.ContentLength > h.MaxBody {
		return nil, &http.MaxBytesError{Limit: h.MaxBody} // before any of it is on its way
	}
	return io.ReadAll(http.MaxBytesReader(w, r.Body, h.MaxBody))
}

func (h *handler) overwrite(ctx context.Context, key string, f Fence, value []byte) (Record, error) {
	if err := h.store.(Overwriter).Overwrite(ctx, key, f, value); err != nil {
		return Record{}, err
	}
	return h.store.Read(ctx, key)
}

func (h *handler) get(w http.ResponseWriter, r *http.Request, key string) {
	f, err := fenceOf(r.Header)
	if r.Header.Get(HeaderSeq) != "" {
		err = cmp.Or(err, fmt.Errorf("%s belongs to writes: leave it out", HeaderSeq))
	}
	if err := cmp.Or(checkTarget(r, key), err); err != nil {
		h.fail(w, http.StatusBadRequest, sentence(err))
		return
	}
	f.Seq = 0 // a read stands before its grant's first write
	fenced := f.Token > 0
	d := Decision{Op: OpRead, Key: key, Fence: f, Enforced: fenced && !h.Unfenced}
	rec, err := h.decide(r.Context(), d, func(ctx context.Context) (Record, error) {
		if d.Enforced {
			return h.store.ReadFenced(ctx, key, f.Token)
		}
		rec, err := h.store.Read(ctx, key)
		if fenced && errors.Is(err, ErrNotFound) {
			return Record{}, nil // what a fenced read of an unknown key is with fencing on
		}
		return rec, err
	})
	if err != nil {
		h.refuse(w, r, err)
		return
	}
	h.metrics.reads.Inc()
	w.Header().Set(HeaderMax, rec.MaxFence.String())
	w.Header().Set(HeaderWritten, strconv.FormatBool(rec.Value != nil))
	if acceptsRaw(r.Header) {
		w.Header().Set("Content-Type", rawType)
		w.Header().Set("Content-Length", strconv.Itoa(len(rec.Value)))
		_, _ = w.Write(rec.Value) // a client that is gone gets nothing
		return
	}
	answer := struct {
		Key      string  `json:"key"`
		Value    *string `json:"value,omitempty"`
		Base64   []byte  `json:"value_base64,omitempty"`
		MaxFence uint64  `json:"max_fence"`
	}{Key: key, MaxFence: rec.MaxFence.Token}
	if utf8.Valid(rec.Value) {
		answer.Value = new(string(rec.Value))
	} else {
		answer.Base64 = rec.Value
	}
	h.answer(w, http.StatusOK, answer)
}

// decide runs do, and with an Observer makes it the only call on d's key and tells d.
func (h *handler) decide(ctx context.Context, d Decision, do func(context.Context) (Record, error)) (Record, error) {
	if h.Observer == nil {
		return do(ctx)
	}
	mu := &h.stripes[maphash.String(h.seed, d.Key)%uint64(len(h.stripes))]
	mu.Lock()
	defer mu.Unlock()
	if err := CheckContext(ctx); err != nil {
		return Record{}, err
	}
	ctx = context.WithoutCancel(ctx) // an effect that nobody is told of would be a hole in the history
	before, err := h.store.Read(ctx, d.Key)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return Record{}, err
	}
	rec, err := do(ctx)
	stale, refused := errors.AsType[*StaleTokenError](err)
	if refused && stale.Applied && AdmitsWrite(before.MaxFence, d.Fence) {
		// It wasn't applied when this call began, and no other has run since: it is this one that the store has repeated, or
		// one of before without an answer, of which the Observer was not told.
		rec, err, refused = Record{MaxFence: d.Fence}, nil, false
	}
	switch {
	case refused:
		d.Seen = stale.Seen
	case err == nil, errors.Is(err, ErrNotFound):
		d.Seen, d.Accepted = before.MaxFence, true
		if d.Op == OpRead {
			d.Value = rec.Value
		}
	default:
		return rec, err
	}
	h.Observer(d)
	return rec, err
}

// refuse answers an error of the store.
func (h *handler) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if stale, ok := errors.AsType[*StaleTokenError](err); ok {
		h.metrics.stale.Inc()
		w.Header().Set(HeaderSeen, stale.Seen.String())
		w.Header().Set(HeaderApplied, strconv.FormatBool(stale.Applied))
		h.answer(w, http.StatusConflict, struct {
			Error   string `json:"error"`
			Seen    uint64 `json:"seen"`
			Got     uint64 `json:"got"`
			SeenSeq uint64 `json:"seen_seq"`
			GotSeq  uint64 `json:"got_seq"`
			Applied bool   `json:"applied"`
		}{"stale fencing token", stale.Seen.Token, stale.Got.Token, stale.Seen.Seq, stale.Got.Seq, stale.Applied})
		return
	}
	switch {
	case errors.Is(err, ErrNotFound):
		w.Header().Set(HeaderMax, Fence{}.String())
		h.fail(w, http.StatusNotFound, "key not found")
	case errors.Is(err, ErrTooLarge):
		h.fail(w, http.StatusRequestEntityTooLarge, "nothing was written: "+sentence(err))
	case errors.Is(err, ErrJump):
		h.Logger.WarnContext(r.Context(), "a token is too far ahead", "path", r.URL.Path, "error", err)
		h.fail(w, http.StatusBadRequest, sentence(err))
	case errors.Is(err, ErrNoRoom):
		h.Logger.ErrorContext(r.Context(), "the store has no room: nothing is accepted that needs some", "method", r.Method, "path", r.URL.Path, "error", err)
		h.fail(w, http.StatusInsufficientStorage, "nothing was changed: the store has no room; its log tells the operator why")
	case errors.Is(err, ErrClosed):
		h.fail(w, http.StatusServiceUnavailable, "the resource is shutting down")
	default:
		h.Logger.ErrorContext(r.Context(), "the store failed", "method", r.Method, "path", r.URL.Path, "error", err)
		h.fail(w, http.StatusInternalServerError, "the store failed; a write may have taken effect: repeat it to find out")
	}
}

func (h *handler) fail(w http.ResponseWriter, status int, sentence string) {
	h.answer(w, status, problem{sentence})
}

func (h *handler) answer(w http.ResponseWriter, status int, v any) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // numbers and strings only
	}
	b.Truncate(b.Len() - 1) // the encoder's newline: the body is the JSON and nothing else
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(b.Len()))
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes()) // a client that is gone gets nothing
}

// checkTarget returns what is wrong with the key in r's path, or nil.
func checkTarget(r *http.Request, key string) error {
	if r.URL.RawQuery != "" || r.URL.ForceQuery {
		return errors.New("the URL has a query: escape a ? in the key as %3F")
	}
	for _, escaped := range r.Header.Values(HeaderKey) {
		if sent, err := url.PathUnescape(escaped); err != nil || sent != key {
			return fmt.Errorf("%s is %.100q, and the key in the path is %.100q: something on the way changes the path",
				HeaderKey, escaped, key)
		}
	}
	return CheckKey(key)
}

// fenceOf returns the fence that h carries, zero if it has none, or an error that says what to send instead.
func fenceOf(h http.Header) (Fence, error) {
	token, err := number(h, HeaderToken)
	if err != nil {
		return Fence{}, err
	}
	seq, err := number(h, HeaderSeq)
	switch {
	case err != nil:
		return Fence{}, err
	case token == 0 && seq > 0:
		return Fence{}, fmt.Errorf("%s is there and %s is not: send both", HeaderSeq, HeaderToken)
	case token == 0:
		return Fence{}, nil
	}
	return Fence{Token: token, Seq: cmp.Or(seq, 1)}, nil
}

// number returns the integer in the named header, or 0 if there is no such header.
func number(h http.Header, name string) (uint64, error) {
	values := h.Values(name)
	if len(values) == 0 {
		return 0, nil
	}
	if len(values) > 1 {
		return 0, fmt.Errorf("%s is there %d times: send it once", name, len(values))
	}
	n, err := strconv.ParseUint(values[0], 10, 64)
	switch {
	case values[0] == "":
		return 0, fmt.Errorf("%s is empty: send an integer from 1", name)
	case errors.Is(err, strconv.ErrRange):
		return 0, fmt.Errorf("%s is too large: send an integer up to 18446744073709551615", name)
	case err != nil:
		return 0, fmt.Errorf("%s is %.40q: send an integer from 1, decimal digits only", name, values[0])
	case n == 0:
		return 0, fmt.Errorf("%s is 0: send an integer from 1", name)
	}
	return n, nil
}

// sentence is err's message without the prefix that is for Go callers.
func sentence(err error) string { return strings.TrimPrefix(err.Error(), "resource: ") }

func acceptsRaw(h http.Header) bool {
	for _, accept := range h.Values("Accept") {
		for part := range strings.SplitSeq(accept, ",") {
			if t, _, err := mime.ParseMediaType(part); err == nil && t == rawType {
				return true
			}
		}
	}
	return false
}
