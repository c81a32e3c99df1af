package locktest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing/iotest"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/wait"
)

// ErrWire is the error of a request that a Wire has lost, or its reply.
var ErrWire = errors.New("broken wire")

// Wire is a client's connection to its server. It counts requests by kind, and has the faults of Scripts.
type Wire struct {
	mu     sync.Mutex
	counts map[string]int
	faults []*fault
	broken chan struct{} // closed while the wire is cut
	held   chan struct{} // closed by deliver
	late   []func()      // what deliver sends
	says   func(what, result string)
}

type fault struct {
	verb   string
	kinds  []string // of requests, or *; then: and whatever follows the first that is struck
	arg    string   // of delay, stall and answer
	every  bool     // until heal; otherwise it strikes once
	struck bool
}

var faults = []string{
	"lose", "lose-reply", "hold", "hold-reply", "delay-reply", "stall-reply", "late", "repeat", "answer", "cut",
}

// NewWire returns a Wire without faults.
func NewWire() *Wire {
	return &Wire{counts: map[string]int{}, broken: make(chan struct{}), held: make(chan struct{}), says: func(string, string) {}}
}

// Do sends a request, as often as the faults say. An answer, unless it is empty, replaces the server's.
func Do[T any](ctx context.Context, w *Wire, kind string, send func(ctx context.Context, answer string) (T, error)) (T, error) {
	w.mu.Lock()
	name, _, _ := strings.Cut(kind, "/")
	w.counts[name]++
	w.mu.Unlock()
	return Disturb(ctx, w, kind, send)
}

// Disturb is Do for what is no request, and isn't counted.
func Disturb[T any](ctx context.Context, w *Wire, kind string, send func(ctx context.Context, answer string) (T, error)) (v T, err error) {
	f, broken := w.next(kind)
	if f.verb == "repeat" {
		if first, err := send(ctx, ""); err != nil {
			return first, err
		}
		f, broken = w.next(kind)
	}
	verb, reply := strings.CutSuffix(f.verb, "-reply")
	if verb == "late" {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.late = append(w.late, func() { _, _ = send(context.WithoutCancel(ctx), "") })
		return v, ErrWire
	}
	if !reply {
		if err = w.strike(ctx, verb, kind, f.arg); err != nil {
			return v, err
		}
	}
	type result struct {
		v   T
		err error
	}
	c, answer := make(chan result, 1), ""
	if verb == "answer" {
		answer = f.arg
	}
	go func() {
		v, err := send(ctx, answer)
		c <- result{v, err}
	}()
	select {
	case r := <-c:
		if !reply || r.err != nil {
			return r.v, r.err
		} else if err = w.strike(ctx, verb, kind, f.arg); err != nil {
			return v, err
		}
		return r.v, nil
	case <-broken: // the reply, whenever it comes, is lost
		return v, ErrWire
	}
}

// Transport sends HTTP requests over a Wire. An answer is a status and a body, which breaks off if it ends with "..."; without a
// status, the server's name is unknown.
type Transport struct {
	*Wire
	Base   http.RoundTripper
	Kind   func(req *http.Request, body []byte) string
	Header http.Header // of answers
}

// RoundTrip implements http.RoundTripper.
func (t Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(cmp.Or(req.Body, io.ReadCloser(http.NoBody)))
	if err != nil {
		return nil, err
	}
	return Do(req.Context(), t.Wire, t.Kind(req, body), func(ctx context.Context, answer string) (*http.Response, error) {
		if answer != "" {
			status, text, _ := strings.Cut(answer, " ")
			code, err := strconv.Atoi(status)
			if err != nil {
				return nil, &net.DNSError{Err: answer, IsNotFound: true}
			}
			var r io.Reader = strings.NewReader(text)
			if text, breaks := strings.CutSuffix(text, "..."); breaks {
				r = io.MultiReader(strings.NewReader(text), iotest.ErrReader(ErrWire))
			}
			return &http.Response{StatusCode: code, Request: req, Body: io.NopCloser(r), Header: t.Header.Clone()}, nil
		}
		req := req.Clone(ctx)
		req.Body = io.NopCloser(bytes.NewReader(body))
		resp, err := t.Base.RoundTrip(req)
		if err != nil {
			return nil, err
		}
		defer func() { _ = resp.Body.Close() }()
		text, err := io.ReadAll(resp.Body)
		resp.Body = io.NopCloser(bytes.NewReader(text))
		return resp, err
	})
}

func (w *Wire) next(kind string) (fault, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	name, _, _ := strings.Cut(kind, "/")
	for i, f := range w.faults {
		if f.verb == "cut" || f.struck && slices.Contains(f.kinds, "then") || slices.ContainsFunc(f.kinds, func(k string) bool {
			return k == "*" || k == kind || k == name || k == kind[len(name):]
		}) {
			f.struck = true
			if f.verb != "cut" && !f.every {
				w.faults = slices.Delete(w.faults, i, i+1)
			}
			return *f, w.broken
		}
	}
	return fault{}, w.broken
}

func (w *Wire) strike(ctx context.Context, verb, kind, arg string) error {
	switch verb {
	case "lose", "cut":
		return ErrWire
	case "delay", "stall":
		d, err := time.ParseDuration(arg)
		if verb == "stall" {
			ctx = context.WithoutCancel(ctx)
		}
		wait.For(ctx, d)
		return errors.Join(err, ctx.Err())
	case "hold":
		w.mu.Lock()
		held := w.held
		w.mu.Unlock()
		w.says(kind, "held")
		select {
		case <-held:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (w *Wire) inject(f *fault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = append(w.faults, f)
	if f.verb == "cut" {
		close(w.broken)
	}
}

// deliver sends late requests before held ones.
func (w *Wire) deliver() {
	w.mu.Lock()
	late, held := w.late, w.held
	w.late, w.held = nil, make(chan struct{})
	w.mu.Unlock()
	for _, send := range late {
		send()
	}
	close(held)
}

// heal ends all faults. It returns an error if one has not struck.
func (w *Wire) heal() (err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.faults {
		if !f.struck && f.verb != "cut" {
			err = fmt.Errorf("there was no %s to %s", strings.Join(f.kinds, ","), f.verb)
		}
		if f.verb == "cut" {
			w.broken = make(chan struct{})
		}
	}
	w.faults = nil
	return err
}

func (w *Wire) count(kind string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts[kind]
}

// sent returns the kinds of requests, and how many of each if more than one, since the last call.
func (w *Wire) sent() (kinds string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, kind := range slices.Sorted(maps.Keys(w.counts)) {
		if kinds += " "; w.counts[kind] > 1 {
			kinds += fmt.Sprintf("%d*", w.counts[kind])
		}
		kinds += kind
	}
	clear(w.counts)
	return kinds
}

// Wired returns b over a Wire. Its requests are of kind acquire, renew and release.
func Wired(b dlock.Backend, w *Wire) dlock.Backend { return wired{b, w} }

type wired struct {
	dlock.Backend
	w *Wire
}

func (w wired) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return Do(ctx, w.w, "acquire", func(ctx context.Context, _ string) (dlock.Grant, error) { return w.Backend.Acquire(ctx, r) })
}

func (w wired) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return Do(ctx, w.w, "acquire", func(ctx context.Context, _ string) (dlock.Grant, error) { return w.Backend.TryAcquire(ctx, r) })
}

func (w wired) Renew(ctx context.Context, g dlock.Grant) error {
	_, err := Do(ctx, w.w, "renew", func(ctx context.Context, _ string) (any, error) { return nil, w.Backend.Renew(ctx, g) })
	return err
}

func (w wired) Release(ctx context.Context, g dlock.Grant) error {
	_, err := Do(ctx, w.w, "release", func(ctx context.Context, _ string) (any, error) { return nil, w.Backend.Release(ctx, g) })
	return err
}

// Link is for a dlocktest.Service. It cuts all requests, and disturbs those of the kinds, and after "then" whatever follows.
func (w *Wire) Link(kinds ...string) dlocktest.Link {
	return Link(func(verb string) (heal func()) { return w.until(&fault{verb: verb, kinds: kinds}) },
		"lose", "lose-reply", "hold-reply", "cut")
}

// Refuse is for a dlocktest.Link. The answer to requests of a kind is a Transport's.
func (w *Wire) Refuse(kind, answer string) func() (heal func()) {
	return func() func() { return w.until(&fault{verb: "answer", kinds: []string{kind}, arg: answer}) }
}

func (w *Wire) until(f *fault) (heal func()) {
	f.every = true
	w.inject(f)
	return sync.OnceFunc(func() {
		_ = w.heal()
		w.deliver()
	})
}
