package dynamostore_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/stretchr/testify/require"
	"github.com/truora/minidyn/server"

	"github.com/fencelab/fencelab/internal/leak"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/dynamostore"
)

// The tests run against a DynamoDB server in the process, or against the one of FENCELAB_DYNAMODB_ENDPOINT, with the
// credentials of AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN and the region of AWS_REGION: an address,
// or "aws" for Amazon's. They make a table, and delete it.
var (
	endpoint  string
	table     = "fencelab-" + rand.Text()
	transport = &http.Transport{MaxIdleConnsPerHost: 200}
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	if endpoint = os.Getenv("FENCELAB_DYNAMODB_ENDPOINT"); endpoint == "" {
		fake := httptest.NewServer(newFake())
		defer func() {
			fake.Close()
			code = cmp.Or(code, leaks())
		}()
		endpoint = fake.URL
	}
	defer transport.CloseIdleConnections()
	ctx := context.Background()
	c := newClient(transport)
	if err := dynamostore.CreateTable(ctx, c, table); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code = m.Run()
	if _, err := c.DeleteTable(ctx, &dynamodb.DeleteTableInput{TableName: &table}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func leaks() int {
	if err := leak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// newFake is the server in the process, with two things made good. It can't keep empty bytes, as DynamoDB does: they
// become other bytes. And it writes the items of its answers while other requests change them: they come one by one.
func newFake() http.Handler {
	const empty, instead = `{"B":""}`, `{"B":"ZW1wdHkgdmFsdWU="}`
	fake := server.NewServer()
	var mu sync.Mutex
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(bytes.ReplaceAll(body, []byte(empty), []byte(instead))))
		answer := httptest.NewRecorder()
		mu.Lock()
		fake.ServeHTTP(answer, r)
		mu.Unlock()
		maps.Copy(w.Header(), answer.Header())
		w.WriteHeader(answer.Code)
		_, _ = w.Write(bytes.ReplaceAll(answer.Body.Bytes(), []byte(instead), []byte(empty)))
	})
}

func newClient(rt http.RoundTripper, more ...func(*dynamodb.Options)) *dynamodb.Client {
	o := dynamodb.Options{
		Region: cmp.Or(os.Getenv("AWS_REGION"), "us-east-1"),
		Credentials: credentials.NewStaticCredentialsProvider(cmp.Or(os.Getenv("AWS_ACCESS_KEY_ID"), "id"),
			cmp.Or(os.Getenv("AWS_SECRET_ACCESS_KEY"), "secret"), os.Getenv("AWS_SESSION_TOKEN")),
		HTTPClient: &http.Client{Transport: rt},
		Retryer:    retry.NewStandard(func(o *retry.StandardOptions) { o.Backoff = atOnce{} }),
	}
	if endpoint != "aws" {
		o.BaseEndpoint = &endpoint
	}
	return dynamodb.New(o, more...)
}

// atOnce is when the clients repeat a request.
type atOnce struct{}

func (atOnce) BackoffDelay(int, error) (time.Duration, error) { return 0, nil }

// once is a client that doesn't repeat requests.
func once(o *dynamodb.Options) { o.Retryer = aws.NopRetryer{} }

// link is the way to the server. It counts requests, and takes what is to happen to the next.
type link struct {
	mu       sync.Mutex
	requests int
	next     func(r *http.Request) (*http.Response, error)
}

func (l *link) RoundTrip(r *http.Request) (*http.Response, error) {
	l.mu.Lock()
	l.requests++
	do := transport.RoundTrip
	if l.next != nil {
		do, l.next = l.next, nil
	}
	l.mu.Unlock()
	return do(r)
}

// on sets what happens to the next request.
func (l *link) on(do func(r *http.Request) (*http.Response, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next = do
}

// sent returns the number of requests since it was last asked.
func (l *link) sent() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	sent := l.requests
	l.requests = 0
	return sent
}

var errCut = errors.New("the connection was cut")

// applied is a request whose reply is lost.
func applied(r *http.Request) (*http.Response, error) {
	resp, err := transport.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return nil, errCut
}

// notApplied is a request that doesn't arrive.
func notApplied(r *http.Request) (*http.Response, error) {
	_ = r.Body.Close()
	return nil, errCut
}

// open returns a Store on the table that the tests share, and the link that it uses.
func open(tb testing.TB, more ...func(*dynamodb.Options)) (*dynamostore.Store, *link) {
	tb.Helper()
	l := &link{}
	s, err := dynamostore.New(newClient(l, more...), table)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, s.Close()) })
	return s, l
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }
