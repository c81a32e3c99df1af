package s3store_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/s3store"
	"github.com/fencelab/fencelab/resource/storetest"
)

func TestStore(t *testing.T) {
	var prefix string
	client := newClient(endpoint, transport)
	reopen := func() (resource.Store, error) {
		return s3store.New(client, bucket, &s3store.Options{Prefix: prefix})
	}
	storetest.Run(t, storetest.Harness{
		New: func() (resource.Store, error) {
			prefix = newPrefix()
			return reopen()
		},
		Reopen: func(s resource.Store) (resource.Store, error) {
			if err := s.Close(); err != nil {
				return nil, err
			}
			return reopen()
		},
	})
}

// TestTwoStores runs the kit on two Stores that take turns, so that what each knows of an object is out of date.
func TestTwoStores(t *testing.T) {
	storetest.Run(t, storetest.Harness{New: func() (resource.Store, error) {
		prefix := newPrefix()
		var p pair
		for i := range p.stores {
			var err error
			if p.stores[i], err = s3store.New(newClient(endpoint, transport), bucket, &s3store.Options{Prefix: prefix}); err != nil {
				return nil, err
			}
		}
		return &p, nil
	}})
}

type pair struct {
	stores [2]*s3store.Store
	calls  atomic.Int64
}

func (p *pair) next() *s3store.Store { return p.stores[p.calls.Add(1)%2] }

func (p *pair) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	return p.next().Write(ctx, key, f, value)
}

func (p *pair) Read(ctx context.Context, key string) (resource.Record, error) {
	return p.next().Read(ctx, key)
}

func (p *pair) ReadFenced(ctx context.Context, key string, token uint64) (resource.Record, error) {
	return p.next().ReadFenced(ctx, key, token)
}

func (p *pair) Close() error { return errors.Join(p.stores[0].Close(), p.stores[1].Close()) }

// TestETagIgnoresMetadata is why the fence is in the body: If-Match can't see what is in the metadata.
func TestETagIgnoresMetadata(t *testing.T) {
	client, key := newClient(endpoint, transport), newPrefix()+"k"
	var etags []string
	for _, fence := range []string{"1", "2"} {
		out, err := client.PutObject(t.Context(), &s3.PutObjectInput{
			Bucket: &bucket, Key: &key, Body: strings.NewReader("v"), Metadata: map[string]string{"fence": fence},
		})
		require.NoError(t, err)
		etags = append(etags, *out.ETag)
	}
	require.Equal(t, etags[0], etags[1])
}

// TestFirstTouchIsSeen has a holder that knows the object's ETag, and a successor that reads and changes nothing else.
func TestFirstTouchIsSeen(t *testing.T) {
	prefix, ctx := newPrefix(), t.Context()
	holder, link := open(t, prefix)
	successor, _ := open(t, prefix)
	require.NoError(t, holder.Write(ctx, "k", at(7), []byte("v")))
	rec, err := successor.ReadFenced(ctx, "k", 8)
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("v"), MaxFence: resource.Fence{Token: 8}}, rec)
	link.sent()

	late := resource.Fence{Token: 7, Seq: 2}
	require.Equal(t, &resource.StaleTokenError{Key: "k", Seen: rec.MaxFence, Got: late}, holder.Write(ctx, "k", late, []byte("late")))
	require.Equal(t, map[string]int{http.MethodPut: 1, http.MethodGet: 1}, link.sent())
}

// TestRequests counts what each call sends.
func TestRequests(t *testing.T) {
	prefix, ctx := newPrefix(), t.Context()
	s, link := open(t, prefix)
	other, _ := open(t, prefix)
	const get, put = http.MethodGet, http.MethodPut
	for _, c := range []struct {
		name string
		call func() error
		want map[string]int
	}{
		{"write of a key not seen before", func() error { return s.Write(ctx, "k", at(1), nil) }, map[string]int{get: 1, put: 1}},
		{"write", func() error { return s.Write(ctx, "k", at(2), nil) }, map[string]int{put: 1}},
		{"first fenced read of a grant", func() error { _, err := s.ReadFenced(ctx, "k", 3); return err }, map[string]int{get: 1, put: 1}},
		{"write after it", func() error { return s.Write(ctx, "k", at(3), nil) }, map[string]int{put: 1}},
		{"another fenced read", func() error { _, err := s.ReadFenced(ctx, "k", 3); return err }, map[string]int{get: 1}},
		{"read", func() error { _, err := s.Read(ctx, "k"); return err }, map[string]int{get: 1}},
		{"another's write", func() error { return other.Write(ctx, "k", at(4), nil) }, map[string]int{}},
		{"write after it", func() error { return s.Write(ctx, "k", at(5), nil) }, map[string]int{put: 2, get: 1}},
		{"write without a look at the fence", func() error { return s.Overwrite(ctx, "k", resource.Fence{}, nil) }, map[string]int{put: 1}},
		{"refused write", func() error {
			if err := s.Write(ctx, "k", at(4), nil); err == nil {
				return errors.New("it was accepted")
			}
			return nil
		}, map[string]int{get: 1}},
	} {
		require.NoError(t, c.call(), c.name)
		require.Equal(t, c.want, link.sent(), c.name)
	}
}

// TestLostRace lets another write in between a call's look at the object and its PUT.
func TestLostRace(t *testing.T) {
	for _, c := range []struct {
		name   string
		rivals []uint64 // the tokens of writes that come in between, one an attempt
		stale  resource.Fence
	}{
		{"one of a lesser fence", []uint64{3}, resource.Fence{}},
		{"several of lesser fences", []uint64{3, 4, 5, 6}, resource.Fence{}},
		{"one of a greater fence", []uint64{9}, at(9)},
		{"several, the last of a greater fence", []uint64{3, 4, 9}, at(9)},
	} {
		for _, existed := range []bool{true, false} {
			t.Run(c.name, func(t *testing.T) {
				prefix, ctx := newPrefix(), t.Context()
				s, link := open(t, prefix)
				rival, _ := open(t, prefix)
				if existed {
					require.NoError(t, s.Write(ctx, "k", at(1), nil))
				}
				rivals := c.rivals
				var interfere func(r *http.Request) (*http.Response, error)
				interfere = func(r *http.Request) (*http.Response, error) {
					if err := rival.Write(ctx, "k", at(rivals[0]), []byte("rival")); err != nil {
						return nil, err
					}
					if rivals = rivals[1:]; len(rivals) > 0 {
						link.onPut(interfere)
					}
					return transport.RoundTrip(r)
				}
				link.onPut(interfere)
				err := s.Write(ctx, "k", at(7), []byte("v"))
				want := resource.Record{Value: []byte("v"), MaxFence: at(7)}
				if c.stale != (resource.Fence{}) {
					require.Equal(t, &resource.StaleTokenError{Key: "k", Seen: c.stale, Got: at(7)}, err)
					want = resource.Record{Value: []byte("rival"), MaxFence: c.stale}
				} else {
					require.NoError(t, err)
				}
				require.Empty(t, rivals)
				got, err := s.Read(ctx, "k")
				require.NoError(t, err)
				require.Equal(t, want, got)
			})
		}
	}
}

// TestLostRaceOfRead has a write between a fenced read's GET and the PUT that raises the fence: the read must return it.
func TestLostRaceOfRead(t *testing.T) {
	prefix, ctx := newPrefix(), t.Context()
	s, link := open(t, prefix)
	rival, _ := open(t, prefix)
	require.NoError(t, s.Write(ctx, "k", at(1), []byte("old")))
	link.onPut(func(r *http.Request) (*http.Response, error) {
		if err := rival.Write(ctx, "k", at(3), []byte("new")); err != nil {
			return nil, err
		}
		return transport.RoundTrip(r)
	})
	got, err := s.ReadFenced(ctx, "k", 7)
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("new"), MaxFence: resource.Fence{Token: 7}}, got)
}

// TestLostReply loses the reply to a PUT, or the PUT. The client repeats it; so does the caller of one that doesn't.
func TestLostReply(t *testing.T) {
	prefix, ctx := newPrefix(), t.Context()
	repeating, link := open(t, prefix)
	require.NoError(t, repeating.Write(ctx, "k", at(1), nil))

	link.onPut(applied)
	h, err := resource.NewHandler(repeating, nil)
	require.NoError(t, err)
	put := func() int {
		r := httptest.NewRequestWithContext(ctx, http.MethodPut, "/r/k", strings.NewReader("v"))
		r.Header.Set(resource.HeaderToken, "2")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code
	}
	require.Equal(t, http.StatusOK, put(), "it took effect")
	require.Equal(t, http.StatusConflict, put())
	require.ErrorIs(t, repeating.Write(ctx, "k", at(2), []byte("v")), resource.ErrApplied)
	link.onPut(notApplied)
	require.NoError(t, repeating.Write(ctx, "k", at(3), []byte("v")))
	for i, lose := range []func(*http.Request) (*http.Response, error){applied, notApplied} {
		token := uint64(4 + i)
		link.onPut(lose)
		rec, err := repeating.ReadFenced(ctx, "k", token)
		require.NoError(t, err)
		require.Equal(t, resource.Record{Value: []byte("v"), MaxFence: resource.Fence{Token: token}}, rec)
	}

	s, link := open(t, prefix, once)
	link.onPut(applied)
	require.ErrorIs(t, s.Write(ctx, "k", at(6), []byte("v")), errCut)
	require.ErrorIs(t, s.Write(ctx, "k", at(6), []byte("v")), resource.ErrApplied)
	link.onPut(notApplied)
	require.ErrorIs(t, s.Write(ctx, "k", at(7), []byte("v")), errCut)
	require.NoError(t, s.Write(ctx, "k", at(7), []byte("v")))
}

// TestLostReplyThenLaterFence loses the reply to a write that took effect, and lets a later one in before the client
// repeats the request. To call that write stale would say that it changed nothing.
func TestLostReplyThenLaterFence(t *testing.T) {
	prefix, ctx := newPrefix(), t.Context()
	s, link := open(t, prefix)
	rival, _ := open(t, prefix)
	link.onPut(func(r *http.Request) (*http.Response, error) {
		_, cut := applied(r)
		return nil, errors.Join(cut, rival.Write(ctx, "k", at(9), nil))
	})
	err := s.Write(ctx, "k", at(7), []byte("v"))
	require.ErrorContains(t, err, "the write may have taken effect before: seen 9")
	_, stale := errors.AsType[*resource.StaleTokenError](err)
	require.False(t, stale)
	// The next call has not lost a reply, and says what it saw.
	require.Equal(t, &resource.StaleTokenError{Key: "k", Seen: at(9), Got: at(7)}, s.Write(ctx, "k", at(7), []byte("v")))
}

// TestConflict has a server that answers 409 though the object stays the same: now and then, and for ever.
func TestConflict(t *testing.T) {
	s, link := open(t, newPrefix())
	ctx := t.Context()
	require.NoError(t, s.Write(ctx, "k", at(1), nil))
	var left int
	var busy func(r *http.Request) (*http.Response, error)
	busy = func(r *http.Request) (*http.Response, error) {
		if left--; left > 0 {
			link.onPut(busy)
		}
		return conflict(r)
	}
	left = 3
	link.onPut(busy)
	require.NoError(t, s.Write(ctx, "k", at(2), nil))
	left = 1000
	link.onPut(busy)
	link.sent()
	err := s.Write(ctx, "k", at(3), nil)
	require.ErrorContains(t, err, "8 conditional writes in a row failed and the object is the same")
	require.ErrorContains(t, err, "ConditionalRequestConflict")
	require.Equal(t, map[string]int{http.MethodPut: 9, http.MethodGet: 8}, link.sent())

	cause := errors.New("the cause")
	ended, end := context.WithTimeoutCause(ctx, time.Millisecond, cause)
	defer end()
	require.ErrorIs(t, s.Write(ended, "k", at(3), nil), cause)
}

// TestDeleted deletes an object behind the Store's back, which takes its fence away: no error, but nothing to be done either.
func TestDeleted(t *testing.T) {
	s, link := open(t, newPrefix())
	ctx, name, client := t.Context(), s.Object("k"), newClient(endpoint, transport)
	for i, answer := range []func(*http.Request) (*http.Response, error){nil, missing} { // the server's own, and that of S3
		require.NoError(t, s.Write(ctx, "k", at(uint64(7+i)), nil))
		_, err := client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: &name})
		require.NoError(t, err)
		link.onPut(answer)
		require.NoError(t, s.Write(ctx, "k", at(uint64(9+i)), []byte("v")))
		_, err = client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: &name})
		require.NoError(t, err)
		_, err = s.Read(ctx, "k")
		require.ErrorIs(t, err, resource.ErrNotFound)
		require.NoError(t, s.Write(ctx, "k", at(1), nil))
	}
}

func TestTooLarge(t *testing.T) {
	l := newLink()
	s, err := s3store.New(newClient(endpoint, l), bucket, &s3store.Options{Prefix: newPrefix(), MaxValue: 10})
	require.NoError(t, err)
	for _, write := range []func(context.Context, string, resource.Fence, []byte) error{s.Write, s.Overwrite} {
		err := write(t.Context(), "k", at(1), make([]byte, 11))
		require.ErrorIs(t, err, resource.ErrTooLarge)
		require.ErrorContains(t, err, `that of "k" has 11 bytes, at most 10 are allowed (Options.MaxValue)`)
	}
	require.Empty(t, l.sent())
	require.NoError(t, s.Write(t.Context(), "k", at(1), make([]byte, 10)))
}

// TestForeignObject has objects that others wrote. Nobody knows their fence, so that they are neither read nor replaced.
func TestForeignObject(t *testing.T) {
	s, _ := open(t, newPrefix())
	ctx, client := t.Context(), newClient(endpoint, transport)
	for _, body := range []string{"", "hello", "fencelab/1 7", "fencelab/1 x\nv", "fencelab/1 7 none\nv", "fencelab/2 7\nv"} {
		name := s.Object("k")
		_, err := client.PutObject(ctx, &s3.PutObjectInput{Bucket: &bucket, Key: &name, Body: strings.NewReader(body)})
		require.NoError(t, err)
		const want = "is not a record of this package"
		_, err = s.Read(ctx, "k")
		require.ErrorContains(t, err, want, body)
		_, err = s.ReadFenced(ctx, "k", 9)
		require.ErrorContains(t, err, want, body)
		require.ErrorContains(t, s.Write(ctx, "k", at(9), nil), want, body)
		require.ErrorContains(t, s.Overwrite(ctx, "k", at(9), nil), want, body)
	}
}

// TestNoBucket is not to be taken for an object that doesn't exist.
func TestNoBucket(t *testing.T) {
	s, err := s3store.New(newClient(endpoint, transport), bucket+"-none", nil)
	require.NoError(t, err)
	_, err = s.Read(t.Context(), "k")
	require.ErrorContains(t, err, "NoSuchBucket")
	_, err = s.ReadFenced(t.Context(), "k", 1)
	require.ErrorContains(t, err, "NoSuchBucket")
	require.ErrorContains(t, s.Write(t.Context(), "k", at(1), nil), "NoSuchBucket")
	require.ErrorContains(t, s.Probe(t.Context()), "NoSuchBucket")
}

func TestNewRefuses(t *testing.T) {
	client := newClient(endpoint, transport)
	_, err := s3store.New(nil, bucket, nil)
	require.ErrorContains(t, err, "client is nil")
	_, err = s3store.New(client, "", nil)
	require.ErrorContains(t, err, "bucket is empty")
	_, err = s3store.New(client, bucket, &s3store.Options{MaxValue: -1})
	require.ErrorContains(t, err, "MaxValue is -1 bytes")
	_, err = s3store.New(client, bucket, &s3store.Options{Prefix: strings.Repeat("p", 825)})
	require.ErrorContains(t, err, "prefix has 825 bytes, at most 824 are allowed")
}

func TestOverwrite(t *testing.T) {
	s, _ := open(t, newPrefix())
	ctx := t.Context()
	for _, c := range []struct{ offered, want resource.Fence }{{resource.Fence{}, resource.Fence{}}, {at(5), at(5)}, {at(3), at(5)}, {resource.Fence{}, at(5)}} {
		require.NoError(t, s.Overwrite(ctx, "k", c.offered, []byte(c.offered.String())))
		got, err := s.Read(ctx, "k")
		require.NoError(t, err)
		require.Equal(t, resource.Record{Value: []byte(c.offered.String()), MaxFence: c.want}, got)
	}
}

func TestObject(t *testing.T) {
	s, err := s3store.New(newClient(endpoint, transport), bucket, &s3store.Options{Prefix: "p/"})
	require.NoError(t, err)
	for key, want := range map[string]string{
		"order-1": "p/order-1", "a.b_C": "p/a.b_C", ".": "p/!2E", "..": "p/!2E.", "a/b": "p/a!2Fb", "!": "p/!21", "~": "p/!7E",
		"é": "p/!C3!A9", strings.Repeat("k", 200): "p/" + strings.Repeat("k", 200),
	} {
		require.Equal(t, want, s.Object(key))
	}
	long := strings.Repeat("k", 200)
	require.Len(t, s.Object(long+"1"), len("p/")+200)
	require.NotEqual(t, s.Object(long+"1"), s.Object(long+"2"))
	require.Equal(t, s.Object(long+"1"), s.Object(strings.Clone(long)+"1"))
}

// TestFenceInMetadata is for people: they see an object's fence without reading it.
func TestFenceInMetadata(t *testing.T) {
	s, _ := open(t, newPrefix())
	require.NoError(t, s.Write(t.Context(), "k", resource.Fence{Token: 7, Seq: 2}, bytes.Repeat([]byte("v"), 10)))
	name := s.Object("k")
	head, err := newClient(endpoint, transport).HeadObject(t.Context(), &s3.HeadObjectInput{Bucket: &bucket, Key: &name})
	require.NoError(t, err)
	require.Equal(t, "7.2", head.Metadata["fence"])
}
