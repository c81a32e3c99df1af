package scenarios

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/fencelab/fencelab/internal/observe"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Store is what workers write to. The resource's process opens a store without an Addr and serves it with [resource.NewHandler].
//
// A store with an Addr is a server whose clients are the workers; with fencing off they send no fences. A server doesn't report
// its decisions, and what a worker was told is no evidence, so the [Runner] reads the ledger's record before and after each step
// of a worker: if the fence rose or the value changed, the store accepted a call; a write that changed nothing was refused.
type Store struct {
	Name   string // for Open and histories
	Server string // e.g. "postgres 15.10 (containers)"; empty: Name
	Addr   string // as in [Node]; any string if no call is delayed
	// Open opens the store in the Runner's process; children use [ChildWithStore]'s.
	Open OpenStore
	// Volatile says that a kill loses the data: schedules that kill the resource don't apply.
	Volatile bool
	// Kill kills the server with SIGKILL, and Restart starts it on its data; ctx bounds the call only. Nil: it can't be killed.
	// No other run may use the server at the same time.
	Kill, Restart func(ctx context.Context) error
}

// OpenStore opens a store, which the caller closes; ctx bounds the opening only. With fencing off the store must be a
// [resource.Overwriter]. Calls must not time out: a write may be held for longer than a lease lasts. The client must reconnect
// after a restart of the server.
type OpenStore func(ctx context.Context, s StoreSpec) (resource.Store, error)

// StoreSpec describes the store that a process needs.
type StoreSpec struct {
	Store string // Store.Name
	Addr  string // Store.Addr, or a link to it that delays calls
	// Dir is the data directory of a store without an Addr: empty at first, kept after a kill.
	Dir string
	// Worker says that a worker opens it, after the Runner.
	Worker bool
	// Held says that a write of the worker will be held, which must not hit the handshake of a new connection.
	Held bool
}

// check returns an error if sc can't run over s; it matches [errors.ErrUnsupported] if both are valid.
func (s *Store) check(sc *Scenario) error {
	if s != memory && (s.Open == nil || s.Name == "") {
		return errors.New("scenarios: Runner.Store has no Open or no Name; give it both")
	}
	cannot := func(format string, args ...any) error {
		return fmt.Errorf("scenarios: %s: %s: %w", sc.Name, fmt.Sprintf(format, args...), errors.ErrUnsupported)
	}
	if s.Volatile && sc.leaves(Resource, history.Down) {
		return cannot("%s loses its data when killed", s.name())
	}
	if s.served() {
		return nil // every fault applies to our own process
	}
	if sc.leaves(Resource, history.Down) && (s.Kill == nil || s.Restart == nil) {
		return cannot("%s can't be killed: its Store has no Kill and Restart", s.name())
	}
	for _, name := range slices.Sorted(maps.Keys(sc.Workers)) {
		if sc.Workers[name].Second {
			return cannot("worker %s writes two ledgers, and a Store has one", name)
		}
	}
	if sc.leaves("", history.Delayed) {
		addr, err := hostPort(s.Addr)
		if err == nil {
			_, _, err = net.SplitHostPort(addr)
		}
		if err != nil {
			return cannot("calls to %s can't be delayed: its address has no host and port: %v", s.name(), err)
		}
	}
	return nil
}

var memory = &Store{Server: "memory", Volatile: true}

func (s *Store) served() bool { return s.Addr == "" }

func (s *Store) name() string { return cmp.Or(s.Server, s.Name) }

func (s *Store) open(ctx context.Context) (resource.Store, error) {
	return s.Open.open(ctx, StoreSpec{Store: s.Name, Addr: s.Addr})
}

func (open OpenStore) open(ctx context.Context, s StoreSpec) (resource.Store, error) {
	store, err := open(ctx, s)
	switch {
	case err != nil:
		return nil, fmt.Errorf("open %s: %v", s.Store, err) //nolint:errorlint // an ENOTSUP of the user's is a failure, and nothing to skip
	case store == nil:
		return nil, fmt.Errorf("open %s: got no store and no error", s.Store)
	}
	return store, nil
}

func overwriter(name string, s resource.Store) (resource.Overwriter, error) {
	o, ok := s.(resource.Overwriter)
	if !ok {
		return nil, fmt.Errorf("%s can't be written to with fencing off: its %T has no Overwrite, see resource.Overwriter: %w",
			name, s, errors.ErrUnsupported)
	}
	return o, nil
}

type workerStore struct {
	resource.Store
	overwriter resource.Overwriter // not nil: the worker sends no fences
}

func (s workerStore) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if s.overwriter != nil {
		return s.overwriter.Overwrite(ctx, key, resource.Fence{}, value)
	}
	return s.Store.Write(ctx, key, f, value)
}

type storeTarget struct {
	*Store
	fencing history.Fencing
	record  func(history.Event)

	client  resource.Store
	key     string
	last    resource.Record
	pending map[string]string // worker → the ledger of its next write
	refused int               // reported by workers since the server's last start
	down    bool
}

func newStoreTarget(s *Store, f history.Fencing, record func(history.Event)) *storeTarget {
	return &storeTarget{Store: s, fencing: f, record: record, pending: map[string]string{}}
}

// begin creates an empty ledger, if the store allows writes without a fence.
func (t *storeTarget) begin(ctx context.Context, keys []string) (err error) {
	t.key = keys[0]
	if t.client, err = t.open(ctx); err != nil {
		return err
	}
	o, err := overwriter(t.Store.name(), t.client)
	switch {
	case err == nil:
		err = o.Overwrite(ctx, t.key, resource.Fence{}, []byte{})
	case t.fencing != history.FencingOff:
		err = nil
	}
	if err != nil {
		return err
	}
	t.last, err = t.read(ctx)
	return err
}

func (t *storeTarget) name() string { return t.Store.name() }

func (t *storeTarget) hostPort() string {
	addr, _ := hostPort(t.Addr)
	return addr
}

func (t *storeTarget) url(link string) string {
	if link == "" {
		return t.Addr
	}
	return through(t.Addr, link)
}

func (t *storeTarget) kill(ctx context.Context) error {
	if err := t.sync(ctx, nil); err != nil {
		return err
	}
	t.refused = 0
	t.down = true // perhaps even if Kill fails
	return t.Kill(ctx)
}

// restart takes the record as it is: what a crash undid is no decision.
func (t *storeTarget) restart(ctx context.Context) (err error) {
	if err := t.Restart(ctx); err != nil {
		return err
	}
	t.down = false
	client, err := t.open(ctx) // the old one may not reconnect
	if err != nil {
		return err
	}
	_ = t.client.Close() // it may fail: its server was killed
	t.client = client
	t.last, err = t.read(ctx)
	return err
}

func (t *storeTarget) watch(ctx context.Context, f func(context.Context) error) error { return f(ctx) }

func (t *storeTarget) read(ctx context.Context) (resource.Record, error) {
	rec, err := t.client.Read(ctx, t.key)
	if errors.Is(err, resource.ErrNotFound) {
		err = nil // the judge detects the loss
	}
	return rec, err
}

type call struct {
	op    string
	fence resource.Fence
	value string
}

func (t *storeTarget) callOf(e *history.Event) *call {
	if e == nil {
		return nil
	}
	c := &call{}
	switch e.Name {
	case history.BeforeWrite:
		t.pending[e.Actor] = e.Value
		return nil
	case history.Read, history.ReadStale:
		c.op = observe.Read
		if t.fencing == history.FencingOn {
			c.fence = resource.Fence{Token: e.Token}
		}
	case history.Wrote, history.WriteStale:
		c.op, c.value = observe.Write, t.pending[e.Actor]
		if t.fencing != history.FencingOff {
			c.fence = resource.Fence{Token: e.Token, Seq: 1}
		}
	default:
		return nil
	}
	if e.Name == history.ReadStale || e.Name == history.WriteStale {
		t.refused++
	}
	return c
}

func (t *storeTarget) sync(ctx context.Context, report *history.Event) error {
	if t.down {
		return nil
	}
	now, err := t.read(ctx)
	if err != nil {
		return fmt.Errorf("resource: %w", err)
	}
	c := t.callOf(report)
	if d, changed := effect(t.last, now); changed {
		t.decided(t.last, d)
		t.last = now
		if c != nil && d.Op == c.op && d.Token == c.fence.Token && d.Seq == c.fence.Seq {
			return nil
		}
	}
	if c != nil {
		t.decided(now, withoutEffect(now, c))
	}
	return nil
}

func (t *storeTarget) decided(before resource.Record, d history.Event) {
	d.Kind, d.Time, d.Key = history.KindDecision, time.Now(), t.key
	d.Seen, d.SeenSeq = before.MaxFence.Token, before.MaxFence.Seq
	t.record(d)
}

func effect(before, after resource.Record) (d history.Event, changed bool) {
	rose := after.MaxFence.Compare(before.MaxFence) > 0
	same := bytes.Equal(after.Value, before.Value) && (after.Value == nil) == (before.Value == nil)
	if !rose && same {
		return d, false
	}
	d = history.Event{Op: observe.Write, Accepted: true, Value: string(after.Value)}
	if rose {
		d.Token, d.Seq, d.Enforced = after.MaxFence.Token, after.MaxFence.Seq, true
	}
	if same && d.Seq == 0 {
		d.Op = observe.Read
	}
	return d, true
}

// withoutEffect returns the decision about a call that changed nothing: a refused write, or any read.
func withoutEffect(rec resource.Record, c *call) history.Event {
	d := history.Event{Op: c.op, Token: c.fence.Token, Seq: c.fence.Seq, Enforced: c.fence != resource.Fence{}, Value: c.value}
	if c.op == observe.Read {
		d.Accepted = !d.Enforced || rec.MaxFence.Token == c.fence.Token
		if d.Accepted {
			d.Value = string(rec.Value)
		}
	}
	return d
}

func (t *storeTarget) final(ctx context.Context) (ledgers map[string]resource.Record, refused int, err error) {
	rec, err := t.read(ctx)
	return map[string]resource.Record{t.key: rec}, t.refused, err
}

func (t *storeTarget) end(context.Context) error { return nil }

// close restarts the server if the run left it down.
func (t *storeTarget) close() (err error) {
	if t.down {
		ctx, cancel := context.WithTimeout(context.Background(), DefaultStepTimeout)
		defer cancel()
		if err := t.Restart(ctx); err != nil {
			return fmt.Errorf("restart %s, which the run killed: %w", t.Store.name(), err)
		}
	}
	if t.client == nil {
		return nil
	}
	if err := t.client.Close(); !t.down {
		return err
	}
	return nil // it may fail: its server was killed
}
