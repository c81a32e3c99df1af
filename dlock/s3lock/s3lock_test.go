package s3lock_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/s3lock"
)

// The server's clock has steps of a second.
const short = 2 * time.Second

func TestConformance(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{ShortTTL: short, New: func(t *testing.T) dlocktest.Service {
		return service(t, realSite(t))
	}})
}

func TestConformanceVirtual(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{Virtual: true, ShortTTL: 2 * short, Late: 2*time.Second + poll, New: func(t *testing.T) dlocktest.Service {
		s, _ := newSite(t)
		return service(t, s)
	}})
}

const poll = 200 * time.Millisecond

func service(t *testing.T, s site) dlocktest.Service {
	t.Helper()
	return dlocktest.Service{
		Backend: func() dlock.Backend { return backend(t, s.client(), poll) },
		Faulty: func() (dlock.Backend, dlocktest.Link) {
			w := locktest.NewWire()
			faults := w.Link("put", "then")
			faults.Refuse = w.Refuse("put", "503 <Error><Code>SlowDown</Code></Error>")
			return backend(t, s.over(w), poll), faults
		},
	}
}

// Clients repeat no requests, unless opened with retries. Further steps: put K [BODY [SPACES]], delete K, and omit HEADER of
// replies.
func TestScripts(t *testing.T) {
	locktest.Scripts(t, "testdata/scripts.txt", true, func(t *testing.T) locktest.Bench {
		s, f := newSite(t)
		c, name := s.client(), func(key string) *string { return aws.String("lock/" + key) }
		return locktest.Bench{
			Key: func(key string) string { return key },
			Open: func(w *locktest.Wire, options ...string) dlock.Backend {
				return backend(t, s.over(w, func(o *s3.Options) {
					if options == nil {
						o.Retryer = aws.NopRetryer{}
					}
				}), 0)
			},
			Steps: map[string]func(...string) string{
				"put": func(args ...string) string {
					args = append(args, "", "")
					spaces, _ := strconv.Atoi(args[2])
					body := strings.NewReader(strings.Repeat(" ", spaces) + args[1])
					_, err := c.PutObject(t.Context(), &s3.PutObjectInput{Bucket: aws.String(bucket), Key: name(args[0]), Body: body})
					require.NoError(t, err)
					return ""
				},
				"delete": func(args ...string) string {
					_, err := c.DeleteObject(t.Context(), &s3.DeleteObjectInput{Bucket: aws.String(bucket), Key: name(args[0])})
					require.NoError(t, err)
					return ""
				},
				"omit": func(args ...string) string { f.omits = args[0]; return "" },
			},
		}
	})
}

// A lease ends at the first second that is more than its TTL after any time that Last-Modified may stand for.
func TestWholeSeconds(t *testing.T) {
	for _, c := range []struct{ began, ttl, blocks time.Duration }{
		{0, 3 * time.Second, 4 * time.Second},
		{time.Nanosecond, 3 * time.Second, 4*time.Second - 1},
		{time.Second - 1, 3 * time.Second, 3*time.Second + 1},
		{0, 2500 * time.Millisecond, 4 * time.Second},
		{0, 3*time.Second + 1, 5 * time.Second},
		{time.Second - 1, 3*time.Second + 1, 4*time.Second + 1},
		{time.Second - 1, 1, time.Second + 1},
		{time.Second / 2, time.Hour, time.Hour + time.Second/2},
	} {
		synctest.Test(t, func(t *testing.T) {
			s, _ := newSite(t)
			b, other := backend(t, s.client(), 0), backend(t, s.client(), 0)
			why := fmt.Sprintf("%v at %v", c.ttl, c.began)
			time.Sleep(c.began)
			g, renewed := locktest.Take(t, b, locktest.Request(c.ttl)), locktest.Take(t, b, locktest.Request(1000*time.Hour))
			renewed.TTL = c.ttl // the renewal's counts
			time.Sleep(c.blocks - 1)
			_, err := other.TryAcquire(t.Context(), locktest.Next(g.Key, c.ttl))
			require.ErrorIs(t, err, dlock.ErrHeld, why)
			require.NoError(t, b.Renew(t.Context(), renewed), why)
			time.Sleep(time.Nanosecond)
			require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost, why)
			require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost, why)
			require.Equal(t, g.Fence+1, locktest.Take(t, other, locktest.Next(g.Key, c.ttl)).Fence, why)
			_, err = other.TryAcquire(t.Context(), locktest.Next(renewed.Key, c.ttl))
			require.ErrorIs(t, err, dlock.ErrHeld, why)
			time.Sleep(c.ttl + 2*time.Second)
			locktest.Take(t, other, locktest.Next(renewed.Key, c.ttl))
		})
	}
}

func TestNewRefuses(t *testing.T) {
	client := s3.New(s3.Options{})
	for _, c := range []struct {
		client *s3.Client
		bucket string
		o      s3lock.Options
		want   string
	}{
		{nil, bucket, s3lock.Options{}, "client is nil"},
		{client, "", s3lock.Options{}, "bucket is empty"},
		{client, bucket, s3lock.Options{Prefix: strings.Repeat("p", 825)}, "prefix has 825 bytes, at most 824 are allowed"},
		{client, bucket, s3lock.Options{Poll: time.Microsecond}, "Poll is 1µs; it is at least 1ms"},
	} {
		_, err := s3lock.New(c.client, c.bucket, &c.o)
		require.ErrorContains(t, err, c.want)
		require.ErrorIs(t, err, dlock.ErrInvalid)
	}
	_, err := s3lock.New(client, bucket, &s3lock.Options{Prefix: strings.Repeat("p", 824), Poll: time.Millisecond})
	require.NoError(t, err, "what is allowed at most and at least")
}

func TestOpen(t *testing.T) {
	for _, ignored := range []string{"", "If-Match", "If-None-Match"} {
		s, f := newSite(t)
		f.ignores = ignored
		b, err := s3lock.Open(t.Context(), s.client(), bucket, nil)
		if ignored == "" {
			require.NoError(t, err)
			require.NoError(t, b.Close())
			continue
		}
		require.ErrorIs(t, err, s3lock.ErrNoConditions)
		require.ErrorContains(t, err, "it ignores "+ignored)
		require.Nil(t, b)
	}
}

func TestPrefix(t *testing.T) {
	s, _ := newSite(t)
	for _, prefix := range []string{"", "other/"} {
		b, err := s3lock.New(s.client(), bucket, &s3lock.Options{Prefix: prefix})
		require.NoError(t, err)
		locktest.Take(t, b, dlock.Request{Key: "a/b", Owner: "o", TTL: time.Hour})
		require.NoError(t, b.Close())
	}
	list, err := s.client().ListObjectsV2(t.Context(), &s3.ListObjectsV2Input{Bucket: aws.String(bucket)})
	require.NoError(t, err)
	var names []string
	for _, o := range list.Contents {
		names = append(names, *o.Key)
	}
	require.Equal(t, []string{"lock/a!2Fb", "other/a!2Fb"}, names)
}
