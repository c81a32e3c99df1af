package consullock_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock/consullock"
)

// consul is a minimal Consul in virtual time. Any write answers all blocking queries, and no session expires.
type consul struct {
	*link
	mu       sync.Mutex
	index    uint64
	written  chan struct{} // closed when index grows
	entries  map[string]*api.KVPair
	sessions map[string]bool
	watches  int // blocking queries for sessions that are under way
}

// virtually runs f in a bubble, with a Backend and its Consul.
func virtually(t *testing.T, f func(t *testing.T, b *consullock.Backend, s *consul)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newConsul()
		s.link = newLink(s, "consul")
		b := over(t, s.link, nil)
		t.Cleanup(func() { require.NoError(t, b.Close()) })
		f(t, b, s)
	})
}

func newConsul() *consul {
	return &consul{index: 1, written: make(chan struct{}), entries: make(map[string]*api.KVPair), sessions: make(map[string]bool)}
}

// hold has another owner hold key until free is called.
func (s *consul) hold(key string) (free func()) {
	write := func(f func()) {
		s.mu.Lock()
		defer s.mu.Unlock()
		f()
		s.wrote()
	}
	write(func() {
		s.entries["lock/"+key] = &api.KVPair{Value: []byte("another"), Session: "another's", ModifyIndex: s.index + 1}
	})
	return func() { write(func() { delete(s.entries, "lock/"+key) }) }
}

func (s *consul) state() (sessions, watches int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sessions), s.watches
}

func (s *consul) wrote() {
	s.index++
	close(s.written)
	s.written = make(chan struct{})
}

func (s *consul) RoundTrip(req *http.Request) (*http.Response, error) {
	if err := req.Context().Err(); err != nil {
		return nil, err
	}
	return s.serve(req)
}

// delays the next answer to a request.
func (s *consul) delays(kind string, by time.Duration) {
	s.once(kind, func(req *http.Request) (*http.Response, error) {
		resp, err := s.serve(req)
		time.Sleep(by)
		return resp, err
	})
}

func hangs(req *http.Request) (*http.Response, error) {
	<-req.Context().Done()
	return nil, req.Context().Err()
}

func (s *consul) answer(req *http.Request, status int, v any) (*http.Response, error) {
	body, err := json.Marshal(v)
	return &http.Response{
		StatusCode: status, Request: req, Body: io.NopCloser(strings.NewReader(string(body))),
		Header: http.Header{"X-Consul-Index": {strconv.FormatUint(s.index, 10)}},
	}, err
}

func (s *consul) serve(req *http.Request) (*http.Response, error) {
	k := kind(req)
	name := strings.TrimPrefix(req.URL.Path, "/v1/"+k+"/")
	s.mu.Lock()
	defer s.mu.Unlock()
	switch k {
	case "session/create":
		s.wrote()
		id := fmt.Sprintf("session-%d", s.index)
		s.sessions[id] = true
		return s.answer(req, http.StatusOK, map[string]string{"ID": id})
	case "session/destroy":
		delete(s.sessions, name)
		for n, e := range s.entries {
			if e.Session == name {
				delete(s.entries, n)
			}
		}
		s.wrote()
		return s.answer(req, http.StatusOK, true)
	case "session/info":
		s.watches++
		defer func() { s.watches-- }()
		if err := s.waits(req); err != nil {
			return nil, err
		}
		return s.answer(req, http.StatusOK, s.session(name))
	case "session/renew":
		return s.answer(req, http.StatusOK, s.session(name))
	case "kv":
		if !req.URL.Query().Has("consistent") {
			return nil, errors.New("a stale read")
		}
		if err := s.waits(req); err != nil {
			return nil, err
		}
		if e := s.entries[name]; e != nil {
			return s.answer(req, http.StatusOK, []*api.KVPair{e})
		}
		return s.answer(req, http.StatusNotFound, nil)
	case "txn":
		return s.txn(req)
	}
	return nil, fmt.Errorf("unknown request %s", k)
}

func (s *consul) session(id string) []map[string]string {
	if !s.sessions[id] {
		return nil
	}
	return []map[string]string{{"ID": id}}
}

// waits is a blocking query.
func (s *consul) waits(req *http.Request) error {
	q := req.URL.Query()
	after, _ := strconv.ParseUint(q.Get("index"), 10, 64)
	wait, _ := time.ParseDuration(q.Get("wait"))
	for end := time.After(wait); s.index <= after; {
		written := s.written
		s.mu.Unlock()
		var err error
		over := false
		select {
		case <-written:
		case <-end:
			over = true
		case <-req.Context().Done():
			err = req.Context().Err()
		}
		s.mu.Lock()
		if over || err != nil {
			return err
		}
	}
	return nil
}

func (s *consul) txn(req *http.Request) (*http.Response, error) {
	var ops api.TxnOps
	if err := json.NewDecoder(req.Body).Decode(&ops); err != nil {
		return nil, err
	}
	var answer api.TxnResponse
	no := func(what string, args ...any) {
		answer.Errors = append(answer.Errors, &api.TxnError{What: fmt.Sprintf(what, args...)})
	}
	for _, op := range ops { // whether it can be done
		switch e := s.entries[op.KV.Key]; {
		case op.KV.Verb == api.KVCheckNotExists && e != nil:
			no("key %q exists", op.KV.Key)
		case op.KV.Verb == api.KVCheckIndex && (e == nil || e.ModifyIndex != op.KV.Index):
			no("failed index check for key %q, current modify index", op.KV.Key)
		case op.KV.Verb == api.KVLock && !s.sessions[op.KV.Session]:
			no("invalid session %q", op.KV.Session)
		case op.KV.Verb == api.KVLock && e != nil && e.Session != op.KV.Session:
			no("failed to lock key %q, lock is already held", op.KV.Key)
		}
	}
	if answer.Errors != nil {
		return s.answer(req, http.StatusConflict, answer)
	}
	s.wrote()
	for _, op := range ops {
		e := &api.KVPair{Key: op.KV.Key, Value: op.KV.Value, Flags: op.KV.Flags, Session: op.KV.Session, ModifyIndex: s.index}
		answer.Results = append(answer.Results, &api.TxnResult{KV: e})
		if op.KV.Verb == api.KVLock {
			s.entries[op.KV.Key] = e
		}
		if op.KV.Verb == api.KVDelete {
			delete(s.entries, op.KV.Key)
		}
	}
	return s.answer(req, http.StatusOK, answer)
}
