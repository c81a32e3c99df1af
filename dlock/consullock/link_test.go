package consullock_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

// link disturbs transactions. A client makes and renews sessions and reads entries before them, so a transaction whose
// reply is lost has been carried out.
type link struct {
	base http.RoundTripper
	url  string

	mu    sync.Mutex
	fault fault
	held  chan struct{} // closed on delivery
	cut   chan struct{} // closed while nothing gets through
	// meddle, if not nil, may answer a request, or do something before it leaves.
	meddle func(*http.Request) (*http.Response, error)
	count  map[string]int // requests by kind, as txn or session/renew
	// blocking counts blocking queries for entries.
	blocking int
}

type fault int

const (
	none fault = iota
	loseRequests
	loseReplies
	holdReplies
	cut
)

var errLink = errors.New("broken link")

func newLink(base http.RoundTripper, url string) *link {
	return &link{
		base: base, url: url, held: make(chan struct{}), cut: make(chan struct{}), count: make(map[string]int),
	}
}

func (l *link) faults() dlocktest.Link {
	return locktest.Link(l.inject, loseRequests, loseReplies, holdReplies, cut)
}

func (l *link) inject(f fault) (heal func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	held := make(chan struct{})
	l.fault, l.held = f, held
	if f == cut {
		close(l.cut)
	}
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fault = none
		close(held)
		if f == cut {
			l.cut = make(chan struct{})
		}
	})
}

func (l *link) set(f func(*http.Request) (*http.Response, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.meddle = f
}

func (l *link) on(k string, f func(*http.Request) (*http.Response, error)) {
	l.set(func(req *http.Request) (*http.Response, error) {
		if kind(req) != k {
			return pass(req)
		}
		return f(req)
	})
}

func (l *link) once(k string, f func(*http.Request) (*http.Response, error)) {
	l.on(k, func(req *http.Request) (*http.Response, error) {
		l.set(nil)
		return f(req)
	})
}

func pass(*http.Request) (*http.Response, error) { return nil, nil } //nolint:nilnil // it goes on its way

// counts returns the number of requests by kind since the last call.
func (l *link) counts() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.count
	l.count = make(map[string]int)
	return c
}

// kind is, for example, txn or session/renew.
func kind(req *http.Request) string {
	s := strings.Split(strings.TrimPrefix(req.URL.Path, "/v1/"), "/")
	if s[0] == "session" {
		return s[0] + "/" + s[1]
	}
	return s[0]
}

func (l *link) RoundTrip(req *http.Request) (*http.Response, error) {
	l.mu.Lock()
	l.count[kind(req)]++
	if kind(req) == "kv" && req.URL.Query().Has("index") {
		l.blocking++
	}
	f, held, off, meddle := l.fault, l.held, l.cut, l.meddle
	l.mu.Unlock()
	if meddle != nil {
		if resp, err := meddle(req); resp != nil || err != nil {
			return resp, err
		}
	}
	disturb := kind(req) == "txn"
	if f == cut || disturb && f == loseRequests {
		return nil, errLink
	}
	type answer struct {
		resp *http.Response
		err  error
	}
	got := make(chan answer, 1)
	go func() {
		resp, err := l.base.RoundTrip(req) //nolint:bodyclose // whoever gets it does
		got <- answer{resp, err}
	}()
	var a answer
	select {
	case a = <-got:
	case <-off: // the reply, whenever it comes, is lost
		go func() {
			if a := <-got; a.resp != nil {
				_ = a.resp.Body.Close()
			}
		}()
		return nil, errLink
	}
	if a.err != nil || !disturb {
		return a.resp, a.err
	}
	body, err := io.ReadAll(a.resp.Body)
	_ = a.resp.Body.Close()
	a.resp.Body = io.NopCloser(bytes.NewReader(body))
	switch {
	case err != nil:
		return nil, err
	case f == loseReplies:
		return nil, errLink
	case f == holdReplies:
		select {
		case <-held:
		case <-req.Context().Done():
			return nil, req.Context().Err()
		}
	}
	return a.resp, nil
}
