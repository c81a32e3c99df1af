package s3store_test

import (
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource/s3store"
)

func TestProbe(t *testing.T) {
	client, prefix := newClient(endpoint, transport), newPrefix()
	s, err := s3store.Open(t.Context(), client, bucket, &s3store.Options{Prefix: prefix})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	left, err := client.ListObjectsV2(t.Context(), &s3.ListObjectsV2Input{Bucket: &bucket, Prefix: &prefix})
	require.NoError(t, err)
	require.Empty(t, left.Contents)
}

// The servers ignore half of the conditions, like a cluster with old members.
func TestProbeRefusesNowAndThen(t *testing.T) {
	for seed := range uint64(100) {
		fake, coin := newFake(), rand.New(rand.NewPCG(seed, 0))
		require.ErrorIs(t, openOn(t, func(w http.ResponseWriter, r *http.Request) {
			if coin.IntN(2) == 0 {
				r.Header.Del("If-None-Match")
				r.Header.Del("If-Match")
			}
			fake.ServeHTTP(w, r)
		}), s3store.ErrNoConditions, "seed %d", seed)
	}
}

// A server that is overloaded now and then is asked again, with another object: a refused write may have been applied.
func TestProbeOverloaded(t *testing.T) {
	for every, fails := range map[int]bool{10: false, 1: true} {
		fake, puts, refusals := newFake(), 0, 0
		err := openOn(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPut && r.Header.Get("If-None-Match")+r.Header.Get("If-Match") != "" {
				if puts++; puts%every == 0 && (fails || refusals < 2) {
					refusals++
					fake.ServeHTTP(httptest.NewRecorder(), r)
					w.WriteHeader(http.StatusServiceUnavailable)
					return
				}
			}
			fake.ServeHTTP(w, r)
		})
		require.Equal(t, fails, err != nil, "%v", err)
		require.NotErrorIs(t, err, s3store.ErrNoConditions)
	}
}

// openOn opens a Store on a server.
func openOn(t *testing.T, h http.HandlerFunc) error {
	t.Helper()
	server := httptest.NewServer(h)
	defer server.Close()
	defer transport.CloseIdleConnections()
	client := newClient(server.URL, transport)
	_, err := client.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: &bucket})
	require.NoError(t, err)
	_, err = s3store.Open(t.Context(), client, bucket, nil)
	return err
}

func TestProbeRefuses(t *testing.T) {
	without := func(header string) func(http.Handler, http.ResponseWriter, *http.Request) {
		return func(s3 http.Handler, w http.ResponseWriter, r *http.Request) {
			r.Header.Del(header)
			s3.ServeHTTP(w, r)
		}
	}
	for _, c := range []struct {
		name   string
		server func(s3 http.Handler, w http.ResponseWriter, r *http.Request)
		want   string
	}{
		{"If-None-Match ignored", without("If-None-Match"), "it ignores If-None-Match: * and accepted a second first write of an object"},
		{"If-Match ignored", without("If-Match"), "it ignores If-Match and accepted a write with the ETag of a replaced version"},
		{"not implemented", func(s3 http.Handler, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("If-None-Match") != "" {
				http.Error(w, "<Error><Code>NotImplemented</Code></Error>", http.StatusNotImplemented)
				return
			}
			s3.ServeHTTP(w, r)
		}, "it refuses If-None-Match"},
		{"If-Match never holds", func(s3 http.Handler, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("If-Match") != "" {
				http.Error(w, "<Error><Code>PreconditionFailed</Code></Error>", http.StatusPreconditionFailed)
				return
			}
			s3.ServeHTTP(w, r)
		}, "it refuses If-Match with the object's own ETag"},
		{"one ETag for all", func(s3 http.Handler, w http.ResponseWriter, r *http.Request) {
			r.Header.Del("If-Match")
			answer := httptest.NewRecorder()
			s3.ServeHTTP(answer, r)
			for _, name := range []string{"Content-Type", "Content-Length"} {
				w.Header().Set(name, answer.Header().Get(name))
			}
			w.Header().Set("ETag", `"same"`)
			w.WriteHeader(answer.Code)
			_, _ = w.Write(answer.Body.Bytes())
		}, `the ETag was "\"same\"" before and "\"same\"" after`},
		{"refused and written all the same", func(s3 http.Handler, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("If-Match") == "" {
				s3.ServeHTTP(w, r)
				return
			}
			answer := httptest.NewRecorder()
			head := r.Clone(r.Context())
			head.Method, head.Body = http.MethodHead, http.NoBody
			s3.ServeHTTP(answer, head)
			holds := answer.Header().Get("ETag") == r.Header.Get("If-Match")
			r.Header.Del("If-Match")
			if holds {
				s3.ServeHTTP(w, r)
				return
			}
			s3.ServeHTTP(httptest.NewRecorder(), r)
			http.Error(w, "<Error><Code>PreconditionFailed</Code></Error>", http.StatusPreconditionFailed)
		}, "that of its last accepted write was"},
	} {
		t.Run(c.name, func(t *testing.T) {
			fake := newFake()
			err := openOn(t, func(w http.ResponseWriter, r *http.Request) { c.server(fake, w, r) })
			require.ErrorIs(t, err, s3store.ErrNoConditions)
			require.ErrorContains(t, err, c.want)
		})
	}
}
