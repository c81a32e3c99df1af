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
	"time"

	"github.com/hashicorp/consul/api"
)

// consul is a minimal Consul in virtual time. A session ends as soon as Consul may end it.
type consul struct {
	mu       sync.Mutex
	index    uint64
	written  chan struct{} // closed when index grows
	entries  map[string]*api.KVPair
	sessions map[string]*session
	changed  map[string]uint64    // index by path of an entry or session
	delayed  map[string]time.Time // end of an entry's lock-delay
	watches  int                  // blocking queries for sessions in progress
}

type session struct {
	ID, Behavior string
	LockDelay    time.Duration
	NodeChecks   []string
	TTL          string
	ttl          time.Duration
	end          *time.Timer
}

func newConsul() *consul {
	return &consul{
		index: 1, written: make(chan struct{}), entries: map[string]*api.KVPair{}, sessions: map[string]*session{},
		changed: map[string]uint64{}, delayed: map[string]time.Time{},
	}
}

func (s *consul) wrote(path string) {
	s.index++
	s.changed[path] = s.index
	close(s.written)
	s.written = make(chan struct{})
}

func (s *consul) restore() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.index = 1
	clear(s.changed)
}

func (s *consul) RoundTrip(req *http.Request) (*http.Response, error) {
	if err := req.Context().Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	path := strings.TrimPrefix(req.URL.Path, "/v1/")
	call, name := path, ""
	if dir, rest, _ := strings.Cut(path, "/"); dir == "kv" {
		call, name = dir, rest
	} else if i := strings.LastIndex(path, "/"); dir == "session" && i > len(dir) {
		call, name = path[:i], path[i+1:]
	}
	if (call == "kv" || call == "txn") && !req.URL.Query().Has("consistent") {
		return nil, errors.New("it may be stale")
	}
	switch call {
	case "session/create":
		return s.create(req)
	case "session/destroy":
		s.destroy(name)
		return s.answer(req, http.StatusOK, path, true)
	case "session/info":
		s.watches++
		defer func() { s.watches-- }()
		if err := s.waits(req, path); err != nil {
			return nil, err
		}
		return s.answer(req, http.StatusOK, path, s.session(name))
	case "session/renew":
		if n := s.sessions[name]; n != nil {
			n.end.Reset(n.ttl)
		}
		return s.answer(req, http.StatusOK, path, s.session(name))
	case "kv":
		if err := s.waits(req, path); err != nil {
			return nil, err
		}
		if e := s.entries[name]; e != nil {
			return s.answer(req, http.StatusOK, path, []*api.KVPair{e})
		}
		return s.answer(req, http.StatusNotFound, path, nil)
	case "txn":
		return s.txn(req)
	}
	return nil, fmt.Errorf("unknown request %s", path)
}

func (s *consul) answer(req *http.Request, status int, path string, v any) (*http.Response, error) {
	body, err := json.Marshal(v)
	return &http.Response{
		StatusCode: status, Request: req, Body: io.NopCloser(strings.NewReader(string(body))),
		Header: http.Header{"X-Consul-Index": {strconv.FormatUint(max(1, s.changed[path]), 10)}},
	}, err
}

func (s *consul) create(req *http.Request) (*http.Response, error) {
	asked := struct {
		Behavior, LockDelay, TTL string
		NodeChecks               []string
	}{"release", "15s", "", []string{"serfHealth"}}
	err := json.NewDecoder(req.Body).Decode(&asked)
	delay, delayErr := time.ParseDuration(asked.LockDelay)
	ttl, ttlErr := time.ParseDuration(asked.TTL)
	id := fmt.Sprintf("session-%d", s.index)
	s.wrote("session/info/" + id)
	s.sessions[id] = &session{
		ID: id, Behavior: asked.Behavior, LockDelay: delay, NodeChecks: asked.NodeChecks, TTL: asked.TTL, ttl: ttl,
		end: time.AfterFunc(ttl, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.destroy(id)
		}),
	}
	resp, answerErr := s.answer(req, http.StatusOK, "", map[string]string{"ID": id})
	return resp, errors.Join(err, delayErr, ttlErr, answerErr)
}

func (s *consul) destroy(id string) {
	n := s.sessions[id]
	if n == nil {
		return
	}
	delete(s.sessions, id)
	s.wrote("session/info/" + id)
	for name, e := range s.entries {
		if e.Session != id {
			continue
		}
		if e.Session = ""; n.Behavior == api.SessionBehaviorDelete {
			delete(s.entries, name)
		}
		s.delayed[name] = time.Now().Add(n.LockDelay)
		s.wrote("kv/" + name)
	}
}

func (s *consul) session(id string) []*session {
	if s.sessions[id] == nil {
		return nil
	}
	return []*session{s.sessions[id]}
}

func (s *consul) waits(req *http.Request, path string) error {
	q := req.URL.Query()
	after, _ := strconv.ParseUint(q.Get("index"), 10, 64)
	wait, _ := time.ParseDuration(q.Get("wait"))
	for end := time.After(wait); max(1, s.changed[path]) <= after; {
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
	for _, op := range ops {
		switch e := s.entries[op.KV.Key]; {
		case op.KV.Verb == api.KVCheckNotExists && e != nil:
			no("key %q exists", op.KV.Key)
		case op.KV.Verb == api.KVCheckIndex && e == nil:
			no("failed to check index, key %q doesn't exist", op.KV.Key)
		case op.KV.Verb == api.KVCheckIndex && e.ModifyIndex != op.KV.Index:
			no("failed index check for key %q, current modify index", op.KV.Key)
		case op.KV.Verb == api.KVLock && time.Now().Before(s.delayed[op.KV.Key]): // checked first, on arrival
			no("failed to lock key %q due to lock delay", op.KV.Key)
		case op.KV.Verb == api.KVLock && s.sessions[op.KV.Session] == nil:
			no("invalid session %q", op.KV.Session)
		case op.KV.Verb == api.KVLock && e != nil && e.Session != "" && e.Session != op.KV.Session:
			no("failed to lock key %q, lock is already held", op.KV.Key)
		}
	}
	if answer.Errors != nil {
		return s.answer(req, http.StatusConflict, "", answer)
	}
	s.index++
	for _, op := range ops {
		e := &api.KVPair{Key: op.KV.Key, Value: op.KV.Value, Flags: op.KV.Flags, Session: op.KV.Session, ModifyIndex: s.index}
		answer.Results = append(answer.Results, &api.TxnResult{KV: e})
		switch op.KV.Verb {
		case api.KVLock, api.KVSet:
			s.entries[op.KV.Key] = e
		case api.KVDelete:
			delete(s.entries, op.KV.Key)
		default:
			continue
		}
		s.changed["kv/"+op.KV.Key] = s.index
	}
	close(s.written)
	s.written = make(chan struct{})
	return s.answer(req, http.StatusOK, "", answer)
}
