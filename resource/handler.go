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
	"io"
	"log/slog"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
)

// HandlerOptions configure [NewHandler]. The zero value enforces fencing.
type HandlerOptions struct {
	// Unfenced turns fencing off, for experiments: no write needs a token, no read raises the fence. Needs an [Overwriter].
	Unfenced bool
	// MaxBody is the largest value in bytes; [DefaultMaxBody] if zero.
	MaxBody int64
	// Registerer registers the handler's metrics; nil: none.
	Registerer prometheus.Registerer
	// Token must be sent as "Authorization: Bearer TOKEN"; empty: anyone may call.
	Token string
	// Logger logs the store's errors, whose details clients don't see; nil: nothing is logged.
	Logger *slog.Logger
}

type handler struct {
	HandlerOptions
	store   Store
	write   func(ctx context.Context, key string, f Fence, value []byte) error
	metrics metrics
}

// NewHandler returns the HTTP interface of store:
//
//	PUT /r/{key}   writes the request's body. Needs X-Fence-Token; X-Fence-Seq counts a grant's calls from 1.
//	GET /r/{key}   returns the value and the greatest fence. With X-Fence-Token (X-Fence-Seq is optional) it is a fenced read.
//
// The key is the rest of the path, percent-escaped. An [http.ServeMux] in front redirects paths with "//", "." or ".." unless
// escaped, as by [Client]. If X-Fence-Key, the percent-escaped key, differs from the path's, a proxy has rewritten the path, and
// the request is refused.
//
// The reply to a stale token is 409 {"error":"stale fencing token","seen":N,"got":M,"seen_seq":1,"got_seq":1,"applied":false}, of
// a full store 507, to a token that [LimitJumps] refuses 400 {"error":"...","jump":true}.
func NewHandler(store Store, opts *HandlerOptions) (http.Handler, error) {
	h := &handler{store: store, write: store.Write}
	if opts != nil {
		h.HandlerOptions = *opts
	}
	if h.Unfenced {
		o, ok := store.(Overwriter)
		if !ok {
			return nil, fmt.Errorf("resource: fencing can't be turned off for a %T, which has no Overwrite", store)
		}
		h.write = o.Overwrite
	}
	if h.MaxBody < 0 {
		return nil, fmt.Errorf("resource: HandlerOptions.MaxBody is %d; it must not be negative", h.MaxBody)
	}
	if strings.ContainsFunc(h.Token, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }) {
		return nil, errors.New("resource: HandlerOptions.Token has a space or a control character, which a header can't carry")
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
		defer h.metrics.observe("write", time.Now())
		h.put(w, r, key)
	case r.Method == http.MethodGet, r.Method == http.MethodHead:
		defer h.metrics.observe("read", time.Now())
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
	got, want := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(h.Token)) // equal lengths: timing reveals nothing
	return strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare(got[:], want[:]) == 1
}

func (h *handler) put(w http.ResponseWriter, r *http.Request, key string) {
	f, err := fenceOf(r.Header, 1)
	if err == nil && f == (Fence{}) && !h.Unfenced {
		err = fmt.Errorf("%s is missing: send the fencing token of your lock grant, an integer from 1", HeaderToken)
	}
	for _, name := range []string{"If-Match", "If-None-Match", "If-Unmodified-Since", "Content-Range", "Content-Encoding"} { // ignored, they must not seem to hold
		if r.Header.Get(name) != "" {
			err = cmp.Or(err, fmt.Errorf("%s is not supported: only the fence decides, and the body, as it is, is the whole value", name))
		}
	}
	if err := cmp.Or(checkTarget(r, key), err); err != nil {
		h.fail(w, http.StatusBadRequest, withoutPrefix(err))
		return
	}
	if r.ContentLength == 0 && r.Header.Get("Content-Length") == "" { // curl -X PUT without -d would erase the value
		h.fail(w, http.StatusLengthRequired, "nothing was written, the request has no body: send one, or Content-Length: 0 for an empty value")
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
	if err := h.write(r.Context(), key, f, value); err != nil {
		h.refuse(w, r, err)
		return
	}
	h.metrics.writes.Inc()
	w.Header().Set(HeaderMax, f.String())
	h.respond(w, http.StatusOK, struct {
		Key      string `json:"key"`
		MaxFence uint64 `json:"max_fence"`
	}{key, f.Token})
}

func (h *handler) body(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if r.ContentLength > h.MaxBody {
		return nil, &http.MaxBytesError{Limit: h.MaxBody} // before the client sends it
	}
	return io.ReadAll(http.MaxBytesReader(w, r.Body, h.MaxBody))
}

func (h *handler) get(w http.ResponseWriter, r *http.Request, key string) {
	f, err := fenceOf(r.Header, 0)
	if err := cmp.Or(checkTarget(r, key), err); err != nil {
		h.fail(w, http.StatusBadRequest, withoutPrefix(err))
		return
	}
	var rec Record
	if f.Token > 0 && !h.Unfenced {
		rec, err = h.store.ReadFenced(r.Context(), key, f)
	} else {
		rec, err = h.store.Read(r.Context(), key)
		if f.Token > 0 && errors.Is(err, ErrNotFound) {
			err = nil
		}
	}
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
		_, _ = w.Write(rec.Value) // fails only if the client has disconnected
		return
	}
	reply := struct {
		Key      string  `json:"key"`
		Value    *string `json:"value,omitempty"`
		Base64   []byte  `json:"value_base64,omitempty"`
		MaxFence uint64  `json:"max_fence"`
	}{Key: key, MaxFence: rec.MaxFence.Token}
	if utf8.Valid(rec.Value) {
		reply.Value = new(string(rec.Value))
	} else {
		reply.Base64 = rec.Value
	}
	h.respond(w, http.StatusOK, reply)
}

func (h *handler) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if stale, ok := errors.AsType[*StaleTokenError](err); ok {
		h.metrics.stale.Inc()
		w.Header().Set(HeaderSeen, stale.Seen.String())
		w.Header().Set(HeaderApplied, strconv.FormatBool(stale.Applied))
		h.respond(w, http.StatusConflict, struct {
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
		h.fail(w, http.StatusRequestEntityTooLarge, "nothing was written: "+withoutPrefix(err))
	case errors.Is(err, ErrJump):
		h.Logger.WarnContext(r.Context(), "fencing token too far ahead", "path", r.URL.Path, "error", err)
		h.respond(w, http.StatusBadRequest, problem{Error: withoutPrefix(err), Jump: true})
	case errors.Is(err, ErrNoRoom):
		h.Logger.ErrorContext(r.Context(), "the store has no room", "method", r.Method, "path", r.URL.Path, "error", err)
		h.fail(w, http.StatusInsufficientStorage, "nothing was changed: the store has no room; its log says why")
	case errors.Is(err, ErrClosed):
		h.fail(w, http.StatusServiceUnavailable, "the resource is shutting down")
	default:
		level, message := slog.LevelError, "the store failed"
		if errors.Is(err, context.Cause(r.Context())) { // nil while the client waits
			level, message = slog.LevelDebug, "the client has disconnected"
		}
		h.Logger.Log(r.Context(), level, message, "method", r.Method, "path", r.URL.Path, "error", err)
		h.fail(w, http.StatusInternalServerError, "the store failed; a write may have taken effect: repeat it to find out")
	}
}

func (h *handler) fail(w http.ResponseWriter, status int, message string) {
	h.respond(w, status, problem{Error: message})
}

func (h *handler) respond(w http.ResponseWriter, status int, v any) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(b.Len()))
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes())
}

// checkTarget returns an error unless key, from r's path, is valid and equals [HeaderKey].
func checkTarget(r *http.Request, key string) error {
	if r.URL.RawQuery != "" || r.URL.ForceQuery {
		return errors.New("the URL has a query: escape a ? in the key as %3F")
	}
	for _, escaped := range r.Header.Values(HeaderKey) {
		if sent, _ := url.PathUnescape(escaped); sent != key { // "" after an error, which is no key
			return fmt.Errorf("%s is %.100q, and the key in the path is %.100q: a proxy changes the path",
				HeaderKey, escaped, key)
		}
	}
	return CheckKey(key)
}

func fenceOf(h http.Header, seqIfAbsent uint64) (Fence, error) {
	token, err := number(h, HeaderToken)
	if err != nil {
		return Fence{}, err
	}
	seq, err := number(h, HeaderSeq)
	switch {
	case err != nil:
		return Fence{}, err
	case token == 0 && seq > 0:
		return Fence{}, fmt.Errorf("%s needs %s: send both", HeaderSeq, HeaderToken)
	case token == 0:
		return Fence{}, nil
	}
	return Fence{Token: token, Seq: cmp.Or(seq, seqIfAbsent)}, nil
}

func number(h http.Header, name string) (uint64, error) {
	values := h.Values(name)
	if len(values) == 0 {
		return 0, nil
	}
	if len(values) > 1 {
		return 0, fmt.Errorf("%s was sent %d times: send it once", name, len(values))
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

func withoutPrefix(err error) string { return strings.TrimPrefix(err.Error(), "resource: ") }

func acceptsRaw(h http.Header) bool {
	for _, accept := range h.Values("Accept") {
		for part := range strings.SplitSeq(accept, ",") {
			if t, _, _ := mime.ParseMediaType(part); t == rawType {
				return true
			}
		}
	}
	return false
}
