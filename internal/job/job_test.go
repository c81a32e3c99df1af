package job_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
	"github.com/fencelab/fencelab/internal/job"
	"github.com/fencelab/fencelab/internal/leak"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

func TestMain(m *testing.M) { leak.Main(m) }

const key = "k"

// lock is a lock that its test is free to answer for.
type lock struct {
	lease
	err error // of Acquire and TryAcquire
}

func (l *lock) Acquire(context.Context, string) (job.Lease, error)    { return &l.lease, l.err }
func (l *lock) TryAcquire(context.Context, string) (job.Lease, error) { return &l.lease, l.err }
func (l *lock) Close() error                                          { return nil }

type lease struct {
	token    uint64
	ctx      context.Context
	releases int
	refusal  error // of Release
}

func (l *lease) Fence() uint64            { return l.token }
func (l *lease) TTL() time.Duration       { return time.Minute }
func (l *lease) Until() time.Time         { return time.Unix(60, 0) }
func (l *lease) Context() context.Context { return l.ctx }

func (l *lease) Release(context.Context) error {
	l.releases++
	return l.refusal
}

// recorder collects reports and lets a test act on them.
type recorder struct {
	events []history.Event
	on     map[string]func() error
}

func (r *recorder) at(e history.Event) error {
	r.events = append(r.events, e)
	if do := r.on[e.Name]; do != nil {
		return do()
	}
	return nil
}

func (r *recorder) names() []string {
	names := make([]string, len(r.events))
	for i, e := range r.events {
		names[i] = e.Name
	}
	return names
}

// newJob returns a job under token 7, its parts, and where it reports.
func newJob(t *testing.T) (*job.Job, *lock, *resource.Memory, *recorder) {
	t.Helper()
	l, store, r := &lock{lease: lease{token: 7, ctx: t.Context()}}, resource.NewMemory(), &recorder{on: map[string]func() error{}}
	return &job.Job{Lock: l, Store: store, Key: key, Entry: "A", At: r.at}, l, store, r
}

func requireLedger(t *testing.T, s resource.Store, want ...string) {
	t.Helper()
	rec, err := s.Read(t.Context(), key)
	if !errors.Is(err, resource.ErrNotFound) {
		require.NoError(t, err)
	}
	require.Equal(t, want, append([]string(nil), history.Entries(string(rec.Value))...))
}

func TestReports(t *testing.T) {
	for _, fenced := range []bool{false, true} {
		j, l, store, r := newJob(t)
		require.NoError(t, store.Write(t.Context(), key, resource.Fence{Token: 1, Seq: 1}, []byte("Z\n")))
		j.FencedRead, j.Check = fenced, true
		r.on[history.Read] = func() error {
			rec, err := store.Read(t.Context(), key)
			require.Equal(t, fenced, rec.MaxFence == resource.Fence{Token: 7}, "only a fenced read raises the fence")
			return err
		}
		require.NoError(t, errors.Join(j.Run(t.Context())))
		requireLedger(t, store, "Z", "A")
		require.Equal(t, 1, l.releases)
		for i := range r.events {
			require.WithinDuration(t, time.Now(), r.events[i].Time, time.Minute)
			r.events[i].Time = time.Time{}
		}
		report := func(name, value string) history.Event {
			return history.Event{Kind: history.KindReport, Name: name, Token: 7, Value: value}
		}
		acquired := report(history.Acquired, "")
		acquired.Key = "k"
		acquired.TTL, acquired.Until = history.Duration(time.Minute), time.Unix(60, 0)
		require.Equal(t, []history.Event{
			acquired, report(history.Read, "Z\n"), report(history.BeforeWrite, "Z\nA\n"), report(history.Checked, ""),
			report(history.Wrote, "Z\nA\n"), report(history.Released, ""),
		}, r.events)
	}
}

func TestNobodyListens(t *testing.T) {
	j, _, store, _ := newJob(t)
	j.At = nil
	require.NoError(t, errors.Join(j.Run(t.Context())))
	requireLedger(t, store, "A")
}

func TestRefusedWrite(t *testing.T) {
	j, l, store, r := newJob(t)
	r.on[history.BeforeWrite] = func() error {
		return store.Write(t.Context(), key, resource.Fence{Token: 8, Seq: 1}, []byte("B\n"))
	}
	err := errors.Join(j.Run(t.Context()))
	stale, ok := errors.AsType[*resource.StaleTokenError](err)
	require.True(t, ok, err)
	require.Equal(t, resource.Fence{Token: 7, Seq: 1}, stale.Got)
	require.Equal(t, []string{history.Acquired, history.Read, history.BeforeWrite, history.WriteStale, history.Released}, r.names())
	require.Equal(t, uint64(7), r.events[3].Token)
	require.Equal(t, 1, l.releases)
	requireLedger(t, store, "B")
}

func TestRefusedRead(t *testing.T) {
	j, l, store, r := newJob(t)
	j.FencedRead = true
	_, err := store.ReadFenced(t.Context(), key, 8)
	require.NoError(t, err)
	_, ok := errors.AsType[*resource.StaleTokenError](errors.Join(j.Run(t.Context())))
	require.True(t, ok)
	require.Equal(t, []string{history.Acquired, history.ReadStale, history.Released}, r.names())
	require.Equal(t, 1, l.releases)
	requireLedger(t, store)
}

// answers is a store whose writes take effect and are answered with err.
type answers struct {
	resource.Store
	err error
}

func (s answers) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	return errors.Join(s.Store.Write(ctx, key, f, value), s.err)
}

func TestWriteAnswers(t *testing.T) {
	j, _, store, r := newJob(t)
	j.Store = answers{store, &resource.StaleTokenError{Applied: true}}
	require.NoError(t, errors.Join(j.Run(t.Context())))
	require.Contains(t, r.names(), history.Wrote, "a repeat that is recognised has been written")

	j, l, store, r := newJob(t)
	lost := errors.New("connection reset")
	j.Store = answers{store, lost}
	require.ErrorIs(t, errors.Join(j.Run(t.Context())), lost)
	require.Equal(t, []string{history.Acquired, history.Read, history.BeforeWrite, history.Released}, r.names(), "nobody knows")
	require.Equal(t, 1, l.releases)
}

func TestCheckFindsTheLeaseLost(t *testing.T) {
	for _, check := range []bool{true, false} {
		j, l, store, r := newJob(t)
		var cancel context.CancelFunc
		l.ctx, cancel = context.WithCancel(t.Context())
		r.on[history.BeforeWrite] = func() error { cancel(); return nil }
		l.refusal = dlock.ErrLost
		j.Check = check
		err := errors.Join(j.Run(t.Context()))
		if !check {
			require.NoError(t, err, "the write doesn't depend on the lease's context")
			requireLedger(t, store, "A")
			continue
		}
		require.ErrorIs(t, err, job.ErrGaveUp)
		require.Equal(t, []string{history.Acquired, history.Read, history.BeforeWrite, history.LostLease, history.ReleaseLost}, r.names())
		requireLedger(t, store)
	}
}

func TestRelease(t *testing.T) {
	down := errors.New("the lock server is down")
	for _, c := range []struct {
		err, want error
		name      string
	}{
		{nil, nil, history.Released},
		{fmt.Errorf("dlock: %w", dlock.ErrLost), nil, history.ReleaseLost},
		{dlock.ErrForeignRelease, nil, history.ReleaseForeign},
		{fmt.Errorf("%w: %w", dlock.ErrLost, dlock.ErrForeignRelease), nil, history.ReleaseForeign},
		{down, down, history.Wrote},
	} {
		j, l, _, r := newJob(t)
		l.refusal = c.err
		require.ErrorIs(t, errors.Join(j.Run(t.Context())), c.want)
		names := r.names()
		require.Equal(t, c.name, names[len(names)-1], "%v", c.err)
	}
}

// Whoever listens can end the job at any point; the lock is released, and nothing more is done.
func TestListenerEndsTheJob(t *testing.T) {
	enough := errors.New("enough")
	points := []string{history.Acquired, history.Read, history.BeforeWrite, history.Checked, history.Wrote, history.Released}
	for i, name := range points {
		j, l, store, r := newJob(t)
		j.Check = true
		r.on[name] = func() error { return enough }
		require.ErrorIs(t, errors.Join(j.Run(t.Context())), enough)
		want := slices.Clone(points[:i+1])
		if name != history.Released {
			want = append(want, history.Released)
		}
		require.Equal(t, want, r.names())
		require.Equal(t, 1, l.releases)
		if i < slices.Index(points, history.Wrote) {
			requireLedger(t, store)
		} else {
			requireLedger(t, store, "A")
		}
	}
}

func TestNoLock(t *testing.T) {
	j, l, store, r := newJob(t)
	l.err = dlock.ErrClosed
	for _, try := range []bool{false, true} {
		j.Try = try
		require.ErrorIs(t, errors.Join(j.Run(t.Context())), dlock.ErrClosed)
		require.Empty(t, r.names())
		require.Zero(t, l.releases)
		requireLedger(t, store)
	}
}

func TestTry(t *testing.T) {
	locker, err := dlock.New(memlock.New(nil), &dlock.Options{TTL: time.Minute})
	require.NoError(t, err)
	l := job.FromLocker(locker)
	defer func() { require.NoError(t, l.Close()) }()
	j, _, store, r := newJob(t)
	j.Lock, j.Try = l, true
	require.NoError(t, errors.Join(j.Run(t.Context())))
	require.Equal(t, []string{history.Acquired, history.Read, history.BeforeWrite, history.Wrote, history.Released}, r.names())

	holder, err := l.Acquire(t.Context(), key)
	require.NoError(t, err)
	none, err := l.TryAcquire(t.Context(), key)
	require.ErrorIs(t, err, dlock.ErrHeld)
	require.True(t, none == nil, "no lease, and not a nil handle in it")

	r.events, j.Entry = nil, "B"
	r.on[history.Held] = func() error { return holder.Release(t.Context()) }
	require.NoError(t, errors.Join(j.Run(t.Context())))
	require.Equal(t, []string{history.Held, history.Acquired, history.Read, history.BeforeWrite, history.Wrote, history.Released}, r.names())
	requireLedger(t, store, "A", "B")

	holder, err = l.Acquire(t.Context(), key)
	require.NoError(t, err)
	enough := errors.New("enough")
	r.on[history.Held] = func() error { return enough }
	require.ErrorIs(t, errors.Join(j.Run(t.Context())), enough)
	ctx, cancel := context.WithCancelCause(t.Context())
	r.on[history.Held] = func() error { cancel(enough); return nil }
	require.ErrorIs(t, errors.Join(j.Run(ctx)), enough, "while it waits")
	require.NoError(t, holder.Release(t.Context()))
}

// Sent is reported although the answer is still to come: the server answers once it has been.
func TestSent(t *testing.T) {
	store := resource.NewMemory()
	sent := make(chan struct{})
	h, err := resource.NewHandler(waits{store, sent}, nil)
	require.NoError(t, err)
	server := httptest.NewServer(h)
	defer server.Close()
	client, err := resource.NewClient(server.URL, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Close()) }()

	var names []string
	j := &job.Job{
		Lock: &lock{lease: lease{token: 7, ctx: t.Context()}}, Store: client, Key: key, Entry: "A", Sent: true,
		At: func(e history.Event) error {
			names = append(names, e.Name)
			if e.Name == history.Sent {
				close(sent)
			}
			return nil
		},
	}
	require.NoError(t, errors.Join(j.Run(t.Context())))
	require.Equal(t, []string{history.Acquired, history.Read, history.BeforeWrite, history.Sent, history.Wrote, history.Released}, names)
}

// waits is a store that writes when it may.
type waits struct {
	resource.Store
	until <-chan struct{}
}

func (s waits) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	<-s.until
	return s.Store.Write(ctx, key, f, value)
}
