package s3store_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/awstest"
	"github.com/fencelab/fencelab/resource/internal/eachcall"
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
		Another: reopen,
	})
}

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
		{"first fenced read of a grant", func() error { _, err := s.ReadFenced(ctx, "k", resource.Fence{Token: 3}); return err }, map[string]int{get: 1, put: 1}},
		{"write after it", func() error { return s.Write(ctx, "k", at(3), nil) }, map[string]int{put: 1}},
		{"another fenced read", func() error { _, err := s.ReadFenced(ctx, "k", resource.Fence{Token: 3}); return err }, map[string]int{get: 1}},
		{"read", func() error { _, err := s.Read(ctx, "k"); return err }, map[string]int{get: 1}},
		{"another's write", func() error { return other.Write(ctx, "k", at(4), nil) }, map[string]int{}},
		{"write after it", func() error { return s.Write(ctx, "k", at(5), nil) }, map[string]int{put: 2, get: 1}},
		{"another's write", func() error { return other.Write(ctx, "k", at(6), nil) }, map[string]int{}},
		{"read of it", func() error { _, err := s.Read(ctx, "k"); return err }, map[string]int{get: 1}},
		{"write after it", func() error { return s.Write(ctx, "k", at(7), nil) }, map[string]int{put: 1}},
		{"write without a look at the fence", func() error { return s.Overwrite(ctx, "k", resource.Fence{}, nil) }, map[string]int{put: 1}},
		{"refused write", func() error {
			if err := s.Write(ctx, "k", at(4), nil); err == nil {
				return errors.New("it was accepted")
			}
			return nil
		}, map[string]int{get: 1}},
	} {
		require.NoError(t, c.call(), c.name)
		require.Equal(t, c.want, link.Sent(), c.name)
	}
}

func TestLostRace(t *testing.T) {
	for _, c := range []struct {
		name   string
		rivals []uint64
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
				var interfere []awstest.Handle
				for _, token := range c.rivals {
					interfere = append(interfere, after(rival, token))
				}
				link.On(interfere...)
				err := s.Write(ctx, "k", at(7), []byte("v"))
				want := resource.Record{Value: []byte("v"), MaxFence: at(7)}
				if c.stale != (resource.Fence{}) {
					require.Equal(t, &resource.StaleTokenError{Key: "k", Seen: c.stale, Got: at(7)}, err)
					want = resource.Record{Value: []byte("rival"), MaxFence: c.stale}
				} else {
					require.NoError(t, err)
				}
				require.Zero(t, link.Left())
				got, err := s.Read(ctx, "k")
				require.NoError(t, err)
				require.Equal(t, want, got)
			})
		}
	}
}

func after(rival *s3store.Store, token uint64) awstest.Handle {
	return func(r *http.Request) (*http.Response, error) {
		if err := rival.Write(r.Context(), "k", at(token), []byte("rival")); err != nil {
			return nil, err
		}
		return transport.RoundTrip(r)
	}
}

// TestLostRaceOfRead: a fenced read must return what was written between its GET and its PUT.
func TestLostRaceOfRead(t *testing.T) {
	prefix, ctx := newPrefix(), t.Context()
	s, link := open(t, prefix)
	rival, _ := open(t, prefix)
	require.NoError(t, s.Write(ctx, "k", at(1), []byte("old")))
	link.On(after(rival, 3))
	got, err := s.ReadFenced(ctx, "k", resource.Fence{Token: 7})
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("rival"), MaxFence: resource.Fence{Token: 7}}, got)
}

func TestLostReply(t *testing.T) {
	prefix := newPrefix()
	s, link := open(t, prefix)
	other, linkOther := open(t, prefix, once)
	awstest.LostReply(t, "k", s, link, other, linkOther)
	awstest.LostReplyThenLaterFence(t, "l", s, link, other)

	// An Overwrite keeps the fence of a write whose reply was lost.
	require.NoError(t, other.Write(t.Context(), "m", at(5), nil))
	linkOther.On(awstest.Applied)
	err := other.Write(t.Context(), "m", at(9), nil)
	require.ErrorIs(t, err, awstest.ErrCut)
	require.ErrorContains(t, err, "s3store: ")
	require.NoError(t, other.Overwrite(t.Context(), "m", at(3), nil))
	rec, err := other.Read(t.Context(), "m")
	require.NoError(t, err)
	require.Equal(t, at(9), rec.MaxFence)
}

// The server replies 409 although the object hasn't changed.
func TestConflict(t *testing.T) {
	s, link := open(t, newPrefix())
	ctx := t.Context()
	require.NoError(t, s.Write(ctx, "k", at(1), nil))
	link.On(conflict, conflict, conflict)
	require.NoError(t, s.Write(ctx, "k", at(2), nil))
	link.On(slices.Repeat([]awstest.Handle{conflict}, 1000)...)
	link.Sent()
	err := s.Write(ctx, "k", at(3), nil)
	require.ErrorContains(t, err, "8 conditional writes in a row failed, but the object has not changed")
	require.ErrorContains(t, err, "ConditionalRequestConflict")
	require.Equal(t, map[string]int{http.MethodPut: 9, http.MethodGet: 8}, link.Sent())

	cause := errors.New("the cause")
	ended, end := context.WithTimeoutCause(ctx, time.Millisecond, cause)
	defer end()
	require.ErrorIs(t, s.Write(ended, "k", at(3), nil), cause)
}

// Pauses double from 10 ms to 200 ms, and up to half of each is left out.
func TestPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := s3store.New(newClient("http://s3", handle(func(r *http.Request) (*http.Response, error) {
			if r.Method == http.MethodGet {
				r.Body = http.NoBody
				return missing(r)
			}
			return conflict(r)
		})), bucket, nil)
		require.NoError(t, err)
		began := time.Now()
		require.ErrorContains(t, s.Write(t.Context(), "k", at(1), nil), "8 conditional writes in a row failed")
		took, most := time.Since(began), 710*time.Millisecond
		require.True(t, most/2 <= took && took <= most, took)
	})
}

type handle awstest.Handle

func (do handle) RoundTrip(r *http.Request) (*http.Response, error) { return do(r) }

// Deleting an object deletes its fence.
func TestDeleted(t *testing.T) {
	s, link := open(t, newPrefix())
	ctx, name, client := t.Context(), s.Object("k"), newClient(endpoint, transport)
	for i, answers := range [][]awstest.Handle{nil, {missing}} { // the server's own, and S3's
		require.NoError(t, s.Write(ctx, "k", at(uint64(7+i)), nil))
		_, err := client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: &name})
		require.NoError(t, err)
		link.On(answers...)
		require.NoError(t, s.Write(ctx, "k", at(uint64(9+i)), []byte("v")))
		_, err = client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: &name})
		require.NoError(t, err)
		_, err = s.Read(ctx, "k")
		require.ErrorIs(t, err, resource.ErrNotFound)
		require.NoError(t, s.Write(ctx, "k", at(1), nil))
	}
}

func TestTooLarge(t *testing.T) {
	l := &awstest.Link{}
	s, err := s3store.New(newClient(endpoint, l), bucket, &s3store.Options{Prefix: newPrefix(), MaxValue: 10})
	require.NoError(t, err)
	for _, write := range []func(context.Context, string, resource.Fence, []byte) error{s.Write, s.Overwrite} {
		err := write(t.Context(), "k", at(1), make([]byte, 11))
		require.ErrorIs(t, err, resource.ErrTooLarge)
		require.ErrorContains(t, err, `that of "k" has 11 bytes, at most 10 are allowed (Options.MaxValue)`)
	}
	require.Empty(t, l.Sent())
	require.NoError(t, s.Write(t.Context(), "k", at(1), make([]byte, 10)))
	s, l = open(t, newPrefix())
	require.ErrorIs(t, s.Write(t.Context(), "k", at(1), make([]byte, 5<<20+1)), resource.ErrTooLarge)
	require.Empty(t, l.Sent())
}

type edited func(*http.Response)

func (edit edited) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := transport.RoundTrip(r)
	if err == nil {
		edit(resp)
	}
	return resp, err
}

// Without an ETag a write would have no condition.
func TestNoETag(t *testing.T) {
	noETags := edited(func(resp *http.Response) { resp.Header.Del("ETag") })
	s, err := s3store.New(newClient(endpoint, noETags), bucket, &s3store.Options{Prefix: newPrefix()})
	require.NoError(t, err)
	require.NoError(t, s.Write(t.Context(), "k", at(5), nil))
	require.ErrorContains(t, s.Write(t.Context(), "k", at(6), nil), "without an ETag")
}

func TestTornReply(t *testing.T) {
	torn := edited(func(resp *http.Response) {
		if resp.Request.Method == http.MethodGet && resp.StatusCode == http.StatusOK {
			begins := io.LimitReader(resp.Body, int64(len("fencelab/1 5\nv")))
			resp.Body = struct {
				io.Reader
				io.Closer
			}{io.MultiReader(begins, iotest.ErrReader(io.ErrUnexpectedEOF)), resp.Body}
		}
	})
	s, err := s3store.New(newClient(endpoint, torn), bucket, &s3store.Options{Prefix: newPrefix()})
	require.NoError(t, err)
	require.NoError(t, s.Write(t.Context(), "k", at(5), []byte("value")))
	_, err = s.Read(t.Context(), "k")
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	_, err = s.ReadFenced(t.Context(), "k", resource.Fence{Token: 6})
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

func TestForeignObject(t *testing.T) {
	s, _ := open(t, newPrefix())
	ctx, client := t.Context(), newClient(endpoint, transport)
	for _, body := range []string{"", "hello", "fencelab/1 7", "fencelab/1 x\nv", "fencelab/1 7 none\nv", "fencelab/2 7\nv"} {
		name := s.Object("k")
		_, err := client.PutObject(ctx, &s3.PutObjectInput{Bucket: &bucket, Key: &name, Body: strings.NewReader(body)})
		require.NoError(t, err)
		const want = "is not a record of this package"
		for name, call := range eachcall.Of(s, "k", at(9)) {
			require.ErrorContains(t, call(ctx), want, "%s of %q", name, body)
		}
	}
}

func TestNoBucket(t *testing.T) {
	s, err := s3store.New(newClient(endpoint, transport), bucket+"-none", nil)
	require.NoError(t, err)
	calls := eachcall.Of(s, "k", at(1))
	calls["Probe"] = s.Probe
	for name, call := range calls {
		err := call(t.Context())
		require.ErrorContains(t, err, "s3store: ", name)
		require.ErrorContains(t, err, "NoSuchBucket", name)
	}
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
	_, err = s3store.New(client, bucket, &s3store.Options{Prefix: strings.Repeat("p", 824)})
	require.NoError(t, err)
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

func TestStored(t *testing.T) {
	s, _ := open(t, newPrefix())
	_, err := s.ReadFenced(t.Context(), "read", resource.Fence{Token: 7})
	require.NoError(t, errors.Join(err, s.Write(t.Context(), "written", resource.Fence{Token: 7, Seq: 2}, []byte("v\nv"))))
	for key, want := range map[string][2]string{"read": {"7.0", "fencelab/1 7.0 none\n"}, "written": {"7.2", "fencelab/1 7.2\nv\nv"}} {
		name := s.Object(key)
		o, err := newClient(endpoint, transport).GetObject(t.Context(), &s3.GetObjectInput{Bucket: &bucket, Key: &name})
		require.NoError(t, err)
		body, err := io.ReadAll(o.Body)
		require.NoError(t, errors.Join(err, o.Body.Close()))
		require.Equal(t, want, [2]string{o.Metadata["fence"], string(body)})
	}
}
